"""A tool that runs Python programs, in the sandbox of the reward function `code`. configs/code_*.yaml use it."""

from rl.rewards.sandbox import Limits, print_in_sandbox

LIMITS = Limits(cpu_s=2.0, memory=512 << 20)
MAX_CHARS = 4000  # of the output


def run_python(program: str) -> str:
    """Run a Python program, and return what it prints. Each program starts afresh.

    Args:
        program: the source code
    """
    output = print_in_sandbox(program, LIMITS, MAX_CHARS)
    if output is None:
        return f"The program was stopped. It may use {LIMITS.cpu_s:g} s and {LIMITS.memory >> 20} MB."
    return output or "The program printed nothing."
