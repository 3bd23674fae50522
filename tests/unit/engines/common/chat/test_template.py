"""The chat template that a model is served with, and its effects: parsers, flags, another
engine."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.changes import diff_plans, diff_wishes, starts_same_engine
from gateway.domain import ChatTemplate, Plan
from gateway.engines.common.chat import template
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine, machine, spec, wish
from tests.support.planning import decide
from tests.support.versions import SGLANG, SGLANG_REF, VLLM, VLLM_REF

PROFILES = Profiles()
GIVEN = ChatTemplate(
    text="{{ messages }}<tool_call></think>{% if enable_thinking %}{% endif %}", name="my.jinja"
)
TOKENS = ("<think>", "</think>")


def make_plan(
    ref: str = VLLM_REF, published: str | None = None, template: ChatTemplate | None = None
) -> Plan:
    model = spec().evolve(chat_template=published, added_tokens=TOKENS)
    engine = PROFILES.engine(ref)
    wish_with_template = wish(chat_template=template)
    decision = decide(
        model,
        machine("3090"),
        [engine],
        wish_with_template,
        rules=PROFILES.rules([engine]),
        parsers=PROFILES.parsers,
    )
    return decision.plans[0]


@pytest.mark.parametrize("ref", [f"vllm=={VLLM[0]}", VLLM_REF, f"sglang=={SGLANG[0]}", SGLANG_REF])
@pytest.mark.parametrize("published", [None, "{{ messages }}"])
def test_tools_and_thoughts_follow_from_the_template_of_the_user(
    ref: str, published: str | None
) -> None:
    plan = make_plan(ref, published, GIVEN)
    assert (plan.tool_parser.value, plan.reasoning_parser.value, plan.model.has_chat) == (
        "hermes",
        "qwen3",
        True,
    )
    assert (
        plan.chat_template.value
        == f"my.jinja ({len(GIVEN.text)} bytes, sha256 {GIVEN.digest[:12]})"
    )
    assert plan.chat_template.source == "user"
    assert f"--chat-template={GIVEN.digest}.jinja" in plan.argv
    assert template.digest_in(plan.argv) == GIVEN.digest


def test_an_engine_without_chat_templates_gives_no_plan() -> None:
    without = engine(
        flags={name: flag for name, flag in engine().flags.items() if name != "chat-template"}
    )
    decision = decide(spec(), machine("3090"), [without], wish(chat_template=GIVEN))
    assert not decision.plans
    assert "accepts only the model's own chat template" in decision.rejected[0].reasons[0]


@pytest.mark.parametrize(("published", "value"), [(None, "none"), ("{{ messages }}", "published")])
def test_a_model_without_a_template_is_served_as_it_comes(
    published: str | None, value: str
) -> None:
    plan = make_plan(published=published)
    assert (plan.chat_template.value, plan.tool_parser.value) == (value, "none")
    assert template.digest_in(plan.argv) is None


def test_one_other_letter_in_the_template_is_another_start() -> None:
    other_template = GIVEN.evolve(text=GIVEN.text + " ")
    old_plan, new_plan = make_plan(template=GIVEN), make_plan(template=other_template)
    assert not starts_same_engine(new_plan, old_plan)
    assert "chat template" in [plan.field for plan in diff_plans(old_plan, new_plan)]
    (difference,) = diff_wishes(wish(chat_template=GIVEN), wish(chat_template=other_template))
    assert (difference.field, difference.former, difference.present) == (
        "chat_template",
        str(GIVEN),
        str(other_template),
    )
    (wish_difference,) = diff_wishes(wish(chat_template=GIVEN), wish())
    assert wish_difference.present is None


@pytest.mark.parametrize(
    ("path", "is_template"),
    [
        (f"/models/chat-templates/{GIVEN.digest}.jinja", True),
        (f"/models/chat-templates/../{GIVEN.digest}.jinja", False),
        (f"/models/chat-templates/{GIVEN.digest}.json", False),
        (f"/other/chat-templates/{GIVEN.digest}.jinja", False),
        (f"{GIVEN.digest}.jinja", False),
    ],
)
def test_a_file_is_a_template_of_ours_where_it_lies_below_the_folder(
    path: str, is_template: bool
) -> None:
    assert template.is_file_of("/models", path) is is_template
