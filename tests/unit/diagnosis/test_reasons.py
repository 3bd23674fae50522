"""Reasons against backends, and the setting that is the only one."""

from gateway.diagnosis.reasons import reasons


def test_a_setting_that_is_the_only_reason_is_the_change() -> None:
    texts = reasons(
        "Reasons: {FROB_MLA: [compute capability not supported, kv_cache_dtype not supported],"
        " TRITON_MLA: [kv_cache_dtype not supported]}"
    )
    assert texts["backend"] == "TRITON_MLA"
    assert "--kv-cache-dtype auto" in str(texts["change"])
    assert "change" not in reasons("Reasons: {TRITON_MLA: [sparse not supported]}")


def test_the_report_of_a_build_tool_is_no_reason() -> None:
    assert reasons("topk.cuda.o FAILED: [code=1] topk.cuda.o") == {}
