"""A template that engines could not compile is refused before a model is added, with the line."""

from __future__ import annotations

import pytest

from gateway.errors import BadRequest
from gateway.models.catalog.template_syntax import check


@pytest.mark.parametrize(
    "text",
    [
        "{{ bos_token }}{% for message in messages %}{{ message.content | tojson }}{% endfor %}",
        (
            "{% for m in messages %}{% if not m %}{% continue %}{% endif %}{% generation %}{{ m"
            " }}{% endgeneration %}{% endfor %}"
        ),
        "{{ raise_exception('no') }}{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_that_engines_take_is_taken(text: str) -> None:
    check(text, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\n{% for m in messages %}", "t.jinja is not Jinja: Unexpected end of template"),
        ("a\nb {{ }", "t.jinja is not Jinja: unexpected '}', in line 2"),
        ("{{ x | no_such_filter }}", "No filter named 'no_such_filter', in line 1"),
        ("{% generation %}a", "Unexpected end of template"),
        ("{{ " + "(" * 5000, "is not Jinja"),
    ],
)
def test_a_template_that_engines_refuse_is_refused_with_the_line(text: str, reason: str) -> None:
    with pytest.raises(BadRequest) as error:
        check(text, "t.jinja")
    assert reason in error.value.message
    assert error.value.param == "chat_template"


def test_code_in_a_template_is_not_run() -> None:
    check(
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ 1 / 0 }}{% endfor %}{%"
        " endfor %}",
        "",
    )
