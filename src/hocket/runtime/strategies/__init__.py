"""Strategies that execute a plan, a file each; `hocket.runtime.strategy` has the contract."""
