"""Fault detection: the watchdog beside every rank, its heartbeats and logs, and who is to blame when a world ends."""
