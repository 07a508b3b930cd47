"""The wire contract (`ciar.proto`) and its generated stubs. `make protos` generates them again."""

PROTOCOL = 1
"""Version of the protocol; both sides must speak the same."""
