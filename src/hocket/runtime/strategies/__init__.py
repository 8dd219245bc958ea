"""Strategies that execute a plan, one per file; `hocket.runtime.strategy` defines their
interface."""
