"""A calculator. configs/tiny_calculator.yaml gives it to a tiny model, which has to add three numbers."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
