"""Everything around a running server killed at random; see test_chaos.py."""
