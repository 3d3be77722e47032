"""Settings are held against signatures: names, types, and what to write instead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diffusion.errors import ConfigError
from diffusion.settings import construct


def make(
    *,
    count: int = 1,
    rate: float = 0.0,
    on: bool = True,
    path: str | None = None,
    size: int | tuple[int, int] = 64,
    widths: Sequence[float] = (1, 2),
    inside: dict[str, Any] | None = None,
    given: object = None,
) -> dict:
    return dict(locals())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("count", 3, 3),
        ("count", 1e4, 10_000),
        ("rate", 2, 2),
        ("rate", 0.5, 0.5),
        ("on", False, False),
        ("path", None, None),
        ("path", "a", "a"),
        ("path", 2024, "2024"),
        ("path", Path("a") / "b", "a/b"),
        ("size", 8, 8),
        ("size", [8, 16], [8, 16]),
        ("widths", [1, 1.5], [1, 1.5]),
        ("inside", {"name": "x"}, {"name": "x"}),
    ],
)
def test_taken(key, value, expected):
    got = construct(make, {key: value}, "group")[key]
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("count", "x", "group.count=x is wrong; expected a whole number"),
        ("count", 1.5, "group.count=1.5 is wrong; expected a whole number"),
        ("count", True, "group.count=true is wrong; expected a whole number"),
        ("count", None, "group.count=null is wrong; expected a whole number"),
        ("rate", "fast", "group.rate=fast is wrong; expected a number"),
        ("on", 1, "group.on=1 is wrong; expected true or false"),
        ("widths", 3, "group.widths=3 is wrong; expected a list of numbers, such as [3]"),
        ("size", 1.5, "group.size=1.5 is wrong; expected a whole number or a list of 2 whole num"),
        ("on", "maybe", "group.on=maybe is wrong; expected true or false"),
        ("path", "", "group.path= is wrong; expected text or null"),
        ("path", True, "group.path=true is wrong; expected text or null"),
        ("size", [8], "group.size=[8] is wrong; expected a whole number or a list of 2 whole"),
        ("size", "big", "group.size=big is wrong; expected a whole number or a list of 2 whole"),
        ("widths", 2, "group.widths=2 is wrong; expected a list of numbers"),
        ("inside", False, "group.inside=false is wrong; expected a group of settings or null"),
        ("widths", ["a"], "group.widths=['a'] is wrong; expected a list of numbers"),
        ("widhts", [1], "group.widhts is unknown; did you mean group.widths? valid: count, given"),
    ],
)
def test_refused(key, value, words):
    with pytest.raises(ConfigError) as caught:
        construct(make, {key: value}, "group")
    assert str(caught.value).startswith(words)


def test_what_a_constructor_refuses_is_named_as_in_the_configuration():
    def refuses(rate: float, given: int = 0) -> None:
        raise ConfigError(f"rate={rate}; expected at most 1" if given == 0 else "given=1 is wrong")

    with pytest.raises(ConfigError, match="^group.rate=2; expected at most 1$"):
        construct(refuses, {"rate": 2}, "group")
    with pytest.raises(ConfigError, match="^rate=2; expected"):
        construct(refuses, {"rate": 2}, "")
    with pytest.raises(ConfigError, match="^given=1 is wrong"):  # which is no setting
        construct(refuses, {"rate": 2}, "group", given=1)


def test_what_is_given_is_no_setting():
    assert construct(make, {}, "group", given=5)["given"] == 5
    with pytest.raises(ConfigError, match="given is unknown"):
        construct(make, {"given": 5}, "", given=5)


def test_a_setting_without_a_default_has_to_be_given():
    def make(width: int, depth: int = 2, *, backend: str, **more: int) -> int:
        return width * depth

    assert construct(make, {"width": 3}, "model", backend="torch") == 6
    with pytest.raises(ConfigError, match="^model.width is not set, and has no default$"):
        construct(make, {"depth": 3}, "model", backend="torch")


def test_a_group_is_no_value():
    with pytest.raises(ConfigError, match="train=5 is wrong; it is a group"):
        construct(make, 5, "train")
