"""Framing of messages on sockets. Uses the standard library alone: watchdogs and reward workers start before torch is
imported."""
