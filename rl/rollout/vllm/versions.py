"""The versions of vLLM whose internals the fast paths know."""

from contextlib import suppress

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

TESTED_VERSIONS = SpecifierSet(">=0.26,<0.33")


def untested_notice(version: str) -> str:
    """Return a notice for the user if this version of vLLM was not tested, otherwise an empty string."""
    with suppress(InvalidVersion):
        if TESTED_VERSIONS.contains(version.partition("+")[0], prereleases=True):
            return ""
    return (
        f"vLLM {version} is outside the tested versions ({TESTED_VERSIONS}), so the fast paths for scheduling and "
        "decode attention are off: rollouts are correct, but slower"
    )
