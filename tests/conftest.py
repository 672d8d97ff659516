"""Settings of the whole suite."""

import os

from hypothesis import HealthCheck, settings

# No deadline: the machines that run this are shared, and a slow example is not a wrong one. The same examples in CI every time.
settings.register_profile(
    "leanroll", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("leanroll")
