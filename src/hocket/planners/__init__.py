"""Planners: pure functions (Problem, Plan) -> Plan, one algorithm per file."""
