"""From acceptance measurements to a budget schedule: sweep, fit, cost model."""
