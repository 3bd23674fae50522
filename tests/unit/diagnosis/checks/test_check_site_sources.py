"""The places of a source that raise an error, with message and conditions."""

from __future__ import annotations

from types import ModuleType

import pytest

from gateway.diagnosis.checks.check_site import CheckSite
from tests.support.scripts import script_module

FLAGS = frozenset(
    {"tensor-parallel-size", "kv-cache-dtype", "enable-lora", "frob-size", "speculative-config"}
)
ARGUMENTS = """
class EngineArgs:
    def create(self):
        return CacheConfig(cache_dtype=self.kv_cache_dtype, frob=self.frob_size)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("check_sites")


def sites(script: ModuleType, text: str, path: str = "vllm/frob.py") -> list[CheckSite]:
    fields = script.configuration_fields(ARGUMENTS, FLAGS)
    places: list[CheckSite] = script.check_sites(path, text, script.SettingNames(FLAGS, fields))
    return places


def conditions(script: ModuleType, body: str, path: str = "vllm/frob.py") -> str:
    """The conditions of the only place of a function with this body."""
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    text = f"def run(config, args, hf_config, frob_size=1):\n{lines}\n"
    (site,) = sites(script, text, path)
    return " & ".join(map(str, site.conditions))


@pytest.mark.parametrize(
    ("message", "template"),
    [
        ('"frobs are lost"', "frobs are lost"),
        ('f"{frob} of {len(frobs)} frobs are lost"', "{} of {} frobs are lost"),
        ('"%d frobs of %s are lost" % (3, frob)', "{} frobs of {} are lost"),
        ('"{frob!r} frobs are lost".format(frob=3)', "{} frobs are lost"),
        ('"frobs " + name + " are lost"', "frobs {} are lost"),
        ('("frobs " f"of {name}" " are lost")', "frobs of {} are lost"),
    ],
)
def test_a_message_is_a_template(script: ModuleType, message: str, template: str) -> None:
    (site,) = sites(script, f"def run(frob):\n    raise ValueError({message})\n")
    assert site == CheckSite("vllm/frob.py", "run", "ValueError", template)


def test_a_message_in_a_variable_is_read(script: ModuleType) -> None:
    text = 'def run():\n    text = "frobs are lost"\n    raise ValueError(text)\n'
    assert [site.template for site in sites(script, text)] == ["frobs are lost"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if args.frob_size > 8: raise ValueError('frob')", "frob-size>8"),
        ("assert args.frob_size >= 16", "frob-size<16"),
        ("assert args.frob_size % 16 == 0", "frob-size%16"),
        ("if 8 < args.frob_size: raise ValueError('frob')", "frob-size>8"),
        ("assert frob_size in (1, 2)", "frob-size!~1,2"),
        ("if not config.enable_lora: raise ValueError('frob')", "enable-lora!"),
        ("if config.kv_cache_dtype is None: raise ValueError('frob')", "kv-cache-dtype!"),
        ("if config.kv_cache_dtype == 'fp8': raise ValueError('frob')", "kv-cache-dtype==fp8"),
        ("assert not args.enable_lora and frob_size > 2", "enable-lora= & frob-size<=2"),
        ("if cache_config.cache_dtype == 'fp8': raise ValueError('frob')", "kv-cache-dtype==fp8"),
        (
            "if vllm_config.speculative_config.method != 'mtp': raise ValueError('frob')",
            "speculative-config.method!=mtp",
        ),
        ("if envs.VLLM_USE_FROB: raise ValueError('frob')", "VLLM_USE_FROB="),
        ("if os.environ.get('SGLANG_FROB') == '1': raise ValueError('frob')", "SGLANG_FROB==1"),
        (
            "tp = get_tensor_model_parallel_world_size()\nassert hf_config.num_heads % tp == 0",
            "model.num_heads%tensor-parallel-size & tensor-parallel-size?model.num_heads",
        ),
        ("if not platform.has_device_capability(90): raise ValueError('x y')", "gpu.capability<90"),
        ("if not is_sm100_supported(): raise ValueError('frob')", "gpu.capability<100"),
        ("if not current_platform.is_cuda(): raise ValueError('frob')", "gpu.cuda!"),
        ("if getattr(args, 'frob_size') == 3: raise ValueError('frob')", "frob-size==3"),
    ],
)
def test_a_condition_is_that_of_the_error(script: ModuleType, body: str, expected: str) -> None:
    assert conditions(script, body) == expected


def test_a_return_before_the_error_is_a_condition_and_a_passed_check_is_none(
    script: ModuleType,
) -> None:
    body = "if not args.enable_lora:\n    return\nif frob_size > 3:\n    raise ValueError('a frob')"
    text = body + "\nassert args.kv_cache_dtype == 'auto'"
    lines = "\n".join(f"    {line}" for line in text.split("\n"))
    places = sites(script, f"def run(args, frob_size):\n{lines}\n")
    assert [" & ".join(map(str, site.conditions)) for site in places] == [
        "enable-lora= & frob-size>3",
        "enable-lora= & kv-cache-dtype!=auto",
    ]


def test_a_member_stands_for_the_setting_of_its_value(script: ModuleType) -> None:
    text = """
class Frob:
    def __init__(self, config):
        self.rows = config.frob_size

    def run(self):
        assert self.rows < 4
"""
    (site,) = sites(script, text)
    assert [str(condition) for condition in site.conditions] == ["frob-size>=4"]


def test_the_size_of_a_group_of_ranks_is_a_setting(script: ModuleType) -> None:
    text = """
class Frob:
    def run(self):
        self.group = get_tp_group()
        self.ranks = self.group.world_size
        assert self.rows % self.ranks == 0
"""
    (site,) = sites(script, text)
    assert [str(condition) for condition in site.conditions] == ["tensor-parallel-size?"]


def test_a_report_before_an_exit_is_a_place(script: ModuleType) -> None:
    text = 'def run():\n    logger.error("no frob of %s", name)\n    sys.exit(1)\n'
    assert sites(script, text) == [CheckSite("vllm/frob.py", "run", "", "no frob of {}")]


def test_a_file_that_python_cannot_read_has_no_place(script: ModuleType) -> None:
    assert sites(script, "def run(:\n    raise ValueError('frob')\n") == []
