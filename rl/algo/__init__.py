"""The mathematics of the algorithms as pure functions: advantages, losses, KL and corrections."""
