"""Ranks of one process group: collectives, and the handshake before every call."""
