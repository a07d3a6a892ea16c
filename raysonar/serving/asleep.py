"""Services that have ended their last engine because nobody asked."""

from ray import serve


def is_asleep(application: str, deployment: str) -> bool:
    """Whether a deployment that may scale to zero has no replica that runs, and nothing is wrong with it.

    Waits for Serve's controller: not for an event loop.
    """
    status = serve.status().applications[application].deployments[deployment]
    runs = any(count for state, count in status.replica_states.items() if state == "RUNNING")
    return status.status in ("HEALTHY", "UPSCALING", "DOWNSCALING") and not runs
