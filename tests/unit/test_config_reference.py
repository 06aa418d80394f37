"""docs/configuration.md is current, and lists every key with its default and the allowed values."""

import dataclasses

import pytest

from rl.config.schema import Config, sections_of
from tools import config_reference


def test_the_page_is_current() -> None:
    assert config_reference.main(["--check"]) == 0, "run python tools/config_reference.py"


def test_every_key_is_on_it_with_its_default() -> None:
    page = config_reference.render()
    for section, schema in sections_of(Config):
        keys = [key.name.rstrip("_") for key in dataclasses.fields(schema) if not dataclasses.is_dataclass(key.type)]
        assert keys and all(f"| `{section}.{key}` |" in page for key in keys), section
    assert "| `actor.lr` | `1e-06` |" in page and "| `algo.mask_truncated` | `false` |" in page
    assert "| `sync.verify` | `full` | `full`, `transport`, `off` |" in page
    assert "| `actor.beta1` | `0.9` | at least 0 and less than 1 |" in page
    assert "## placement" in page


def test_a_stale_page_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(config_reference, "HEAD", "# Another\n")
    assert config_reference.main(["--check"]) == 1
    assert "python tools/config_reference.py" in capsys.readouterr().out
