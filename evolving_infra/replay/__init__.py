"""Replay of recorded agents through a gateway, measured and compared with the ideal."""
