"""All checks of `tfdist doctor`, in the order in which they are printed."""

from tfdist.doctor.check import FAILURE, Check
from tfdist.doctor.cluster_checks import check_cluster
from tfdist.doctor.equality_checks import check_equality
from tfdist.doctor.job_facts import JobFacts
from tfdist.doctor.resource_checks import check_resources
from tfdist.doctor.speed_checks import check_speed


def findings(job: JobFacts) -> list[Check]:
    """Returns the results of all checks that the facts allow."""
    found = [*check_cluster(job), *check_equality(job), *check_resources(job), *check_speed(job)]
    if job.is_joint:
        return found
    text = (
        f"{job.name(0)} is the chief, but {job.name(job.worker)} has no connection with it, so this table shows the "
        "findings of one task alone"
    )
    return [Check("chief", FAILURE, text, "See the lines below, and the output of the other tasks", (0,)), *found]
