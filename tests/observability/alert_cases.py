"""What makes each alert fire, and what does not, by the rules' own time series.

Times are minutes, one sample a minute; `VALUE+STEPxN` is promtool's notation. The texts are what a person should read.
"""

from __future__ import annotations

import dataclasses

NODE = 'instance="gpu-17:9464", job="holdfast"'
ON_NODE = {"instance": "gpu-17:9464", "job": "holdfast"}
GIB = 1 << 30


@dataclasses.dataclass
class Case:
    alert: str
    severity: str
    fires: dict[str, str]  # series: values
    at: int  # minutes
    labels: dict[str, str]
    summary: str
    description: str
    quiet: list[dict[str, str]]  # each alone does not make it fire, up to then


def of(metric: str, labels: str = "") -> str:
    return f"{metric}{{{NODE}{', ' if labels else ''}{labels}}}"


def job_running(**more: str) -> dict[str, str]:
    return {of("holdfast_job_ranks_alive", 'job_name="llama"'): "8x400", **more}


def job_ended(**more: str) -> dict[str, str]:
    return {of("holdfast_job_ranks_alive", 'job_name="llama"'): "0x400", **more}


def survives(failure: str) -> str:
    return of("holdfast_job_loss_from_timestamp_seconds", f'job_name="llama", failure="{failure}"')


def lag(tier: str) -> str:
    return of("holdfast_job_tier_lag_seconds", f'job_name="llama", tier="{tier}"')


def tier(metric: str, name: str) -> str:
    return of(metric, f'tier="{name}"')


def counted(metric: str, labels: str = "", by: int = 1) -> dict[str, str]:
    """A counter that stands at 5 and is `by` higher from minute 20 on."""
    return {of(metric, labels): f"5x19 {5 + by}x80"}


CASES = [
    Case(
        alert="HoldfastDaemonDown",
        severity="critical",
        fires={f"up{{{NODE}}}": "1x9 0x20"},
        at=13,
        labels=ON_NODE,
        summary="ckptd on gpu-17:9464 does not answer",
        description="Its metrics could not be fetched for 2 minutes. Ranks on that node cannot save or restore while it is down; "
        "what they have saved stays in memory.",
        quiet=[
            {f"up{{{NODE}}}": "1x30"},
            {f"up{{{NODE}}}": "1x11 0 1x20"},
            {'up{instance="gpu-17:9100", job="node"}': "0x30"},
        ],
    ),
    Case(
        alert="HoldfastNoDaemons",
        severity="warning",
        fires={'up{instance="gpu-17:9100", job="node"}': "1x30"},
        at=12,
        labels={"job": "holdfast"},
        summary="Prometheus knows of no ckptd",
        description="There is no target of the scrape job 'holdfast', so none of these alerts can fire.",
        quiet=[{f"up{{{NODE}}}": "0x30"}],
    ),
    Case(
        alert="HoldfastDaemonRestarts",
        severity="warning",
        fires={of("holdfast_start_time_seconds"): "1x9 2x9 3x9 4x9 5x9"},
        at=45,
        labels=ON_NODE,
        summary="ckptd on gpu-17:9464 starts again and again",
        description="It has started 4 times within an hour. Each costs the saves that are under way.",
        quiet=[{of("holdfast_start_time_seconds"): "1x9 2x9 3x9 4x30"}],
    ),
    Case(
        alert="HoldfastCatalogErrors",
        severity="warning",
        fires={of("holdfast_catalog_errors_total"): "0x9 1+1x40"},
        at=30,
        labels=ON_NODE,
        summary="The catalog on gpu-17:9464 cannot be written",
        description="Writes to state_dir have failed for 15 minutes. Jobs go on; what was pinned or set meanwhile would be forgotten "
        "by a reboot.",
        quiet=[{of("holdfast_catalog_errors_total"): "0x14 3x40"}],
    ),
    Case(
        alert="HoldfastNotAMember",
        severity="critical",
        fires={of("holdfast_cluster_member"): "1x9 0x20"},
        at=13,
        labels=ON_NODE,
        summary="gpu-17:9464 is no member of its cluster",
        description="For 2 minutes it could not keep its lease. Its ranks count as ended for the others, and it hosts no job.",
        quiet=[
            {of("holdfast_cluster_member"): "1x11 0 1x10"},
            {of("holdfast_cluster_members"): "0x20"},
        ],
    ),
    Case(
        alert="HoldfastClusterProblems",
        severity="warning",
        fires={of("holdfast_cluster_problems"): "0x9 2x20"},
        at=21,
        labels=ON_NODE,
        summary="gpu-17:9464 has problems with its cluster",
        description="Lines that its status has shown for 10 minutes: 2.",
        quiet=[{of("holdfast_cluster_problems"): "0x12 2x8 0x10"}],
    ),
    Case(
        alert="HoldfastStepsAbandoned",
        severity="warning",
        fires=counted("holdfast_steps_total", 'outcome="abandoned"', by=3),
        at=35,
        labels={**ON_NODE, "outcome": "abandoned"},
        summary="Steps are not saved by all ranks",
        description="3 steps of jobs that gpu-17:9464 hosts were abandoned within 30 minutes: not all ranks sealed them.",
        quiet=[
            counted("holdfast_steps_total", 'outcome="abandoned"', by=1),
            counted("holdfast_steps_total", 'outcome="retired"', by=30),
        ],
    ),
    Case(
        alert="HoldfastSavesRefused",
        severity="warning",
        fires=counted("holdfast_saves_total", 'outcome="refused"'),
        at=35,
        labels={**ON_NODE, "outcome": "refused"},
        summary="Saves are refused on gpu-17:9464",
        description="Saves of ranks there that were refused within 30 minutes: 1.",
        quiet=[counted("holdfast_saves_total", 'outcome="sealed"')],
    ),
    Case(
        alert="HoldfastNothingCommitted",
        severity="critical",
        fires=job_running(**{survives("process"): "0x400"}),  # saved at second 0
        at=90,
        labels={**ON_NODE, "job_name": "llama", "failure": "process"},
        summary="Job llama has not been saved for 1h 30m 0s",
        description="Its ranks run, and no step of it has been committed for that long.",
        quiet=[
            job_ended(**{survives("process"): "0x400"}),
            job_running(**{survives("process"): "0+60x400"}),
            job_running(**{survives("process"): "0x62 3720x60"}),  # just before the alert
            job_running(**{survives("node"): "0x400"}),
            {survives("process"): "0x400"},  # a job of which nothing more is told
        ],
    ),
    Case(
        alert="HoldfastExposedToNodeLoss",
        severity="warning",
        fires=job_running(
            **{survives("node"): "0x400", survives("process"): "0+60x400", lag("peer"): "0x400"}
        ),
        at=90,
        labels={**ON_NODE, "job_name": "llama", "failure": "node"},
        summary="Losing a node would cost job llama 1h 30m 0s of training",
        description="Its newest step that is whole without any one node is that old.",
        quiet=[
            job_ended(**{survives("node"): "0x400", lag("remote"): "0x400"}),
            job_running(  # just before the alert
                **{survives("node"): "0x62 3720x60", lag("remote"): "0x400"}
            ),
            job_running(
                **{
                    survives("node"): "0+60x400",
                    survives("all_nodes"): "0x400",
                    lag("remote"): "0x400",
                }
            ),
            job_running(**{survives("node"): "0x400"}),  # it has neither replicas nor remote
            job_running(**{survives("node"): "0x400", lag("nvme"): "0x400"}),
        ],
    ),
    Case(
        alert="HoldfastExposedToClusterLoss",
        severity="warning",
        fires=job_running(**{survives("all_nodes"): "0x400", lag("remote"): "0x400"}),
        at=300,
        labels={**ON_NODE, "job_name": "llama", "failure": "all_nodes"},
        summary="Losing all nodes would cost job llama 5h 0m 0s of training",
        description="Its newest step that is whole in the remote tier is that old.",
        quiet=[
            job_ended(**{survives("all_nodes"): "0x400", lag("remote"): "0x400"}),
            job_running(  # just before the alert
                **{survives("all_nodes"): "0x242 14520x100", lag("remote"): "0x400"}
            ),
            job_running(**{survives("domain"): "0x400", lag("remote"): "0x400"}),
            job_running(  # there is no remote tier
                **{survives("all_nodes"): "0x400", lag("nvme"): "0x400", lag("peer"): "0x400"}
            ),
        ],
    ),
    Case(
        alert="HoldfastTierUnhealthy",
        severity="warning",
        fires={tier("holdfast_tier_healthy", "remote"): "1x9 0x20"},
        at=21,
        labels={**ON_NODE, "tier": "remote"},
        summary="The remote tier of gpu-17:9464 fails",
        description="Its operations have failed or hung for 10 minutes. Saves go on; protection by that tier does not advance.",
        quiet=[{tier("holdfast_tier_healthy", "remote"): "1x9 0x8 1x20"}],
    ),
    Case(
        alert="HoldfastTierStalled",
        severity="warning",
        fires={tier("holdfast_tier_stalled", "nvme"): "0x9 3x20"},
        at=16,
        labels={**ON_NODE, "tier": "nvme"},
        summary="The nvme tier of gpu-17:9464 hangs",
        description="Operations that have got nowhere for more than 5 minutes: 3.",
        quiet=[{tier("holdfast_tier_stalled", "nvme"): "0x9 3x3 0x20"}],
    ),
    Case(
        alert="HoldfastTierLags",
        severity="warning",
        fires=job_running(**{lag("nvme"): "1200x60"}),
        at=30,
        labels={**ON_NODE, "job_name": "llama", "tier": "nvme"},
        summary="The nvme tier is 20m 0s behind for job llama",
        description="Its newest step there is so much older than the newest that was committed.",
        quiet=[
            job_running(**{lag("nvme"): "800x60"}),
            job_running(**{lag("remote"): "1200x60"}),
            job_running(**{lag("peer"): "12000x60"}),
            job_ended(**{lag("nvme"): "1200x60"}),
        ],
    ),
    Case(
        alert="HoldfastReplicasNotPlaced",
        severity="warning",
        fires=job_running(**{lag("peer"): "720x60"}),
        at=10,
        labels={**ON_NODE, "job_name": "llama", "tier": "peer"},
        summary="Job llama has had no new replicas for 12m 0s",
        description="Steps are committed, and are not whole in other nodes' memory.",
        quiet=[
            job_running(**{lag("peer"): "500x60"}),
            job_running(**{lag("nvme"): "720x60"}),
            job_ended(**{lag("peer"): "720x60"}),
        ],
    ),
    Case(
        alert="HoldfastTierTooSlow",
        severity="warning",
        fires={
            **counted("holdfast_tier_shed_total", 'tier="nvme"', by=6),
            **counted("holdfast_tier_commits_total", 'tier="nvme"', by=4),
        },
        at=60,
        labels={**ON_NODE, "tier": "nvme"},
        summary="The nvme tier is too slow for what is saved",
        description="6 steps that were due there gave way to newer ones within an hour, more than got there.",
        quiet=[
            {
                **counted("holdfast_tier_shed_total", 'tier="nvme"', by=6),
                **counted("holdfast_tier_commits_total", 'tier="nvme"', by=7),
            },
            {
                **counted("holdfast_tier_shed_total", 'tier="nvme"', by=2),
                **counted("holdfast_tier_commits_total", 'tier="nvme"', by=0),
            },
        ],
    ),
    Case(
        alert="HoldfastTierNearlyFull",
        severity="warning",
        fires={
            tier("holdfast_tier_used_bytes", "nvme"): "97x60",
            tier("holdfast_tier_max_bytes", "nvme"): "100x60",
        },
        at=20,
        labels={**ON_NODE, "tier": "nvme"},
        summary="The nvme tier of gpu-17:9464 is nearly full",
        description="97% of its budget have been used for 15 minutes.",
        quiet=[
            {
                tier("holdfast_tier_used_bytes", "nvme"): "94x60",
                tier("holdfast_tier_max_bytes", "nvme"): "100x60",
            },
            {  # no budget of ours
                tier("holdfast_tier_used_bytes", "remote"): "97x60",
                tier("holdfast_tier_max_bytes", "remote"): "0x60",
            },
            {  # lent memory may all be lent
                tier("holdfast_tier_used_bytes", "peer"): "100x60",
                tier("holdfast_tier_max_bytes", "peer"): "100x60",
            },
        ],
    ),
    Case(
        alert="HoldfastFileSystemNearlyFull",
        severity="warning",
        fires={
            tier("holdfast_tier_used_bytes", "remote"): f"{100 * GIB}x60",
            tier("holdfast_tier_free_bytes", "remote"): f"{10 * GIB}x60",
        },
        at=20,
        labels={**ON_NODE, "tier": "remote"},
        summary="The file system of the remote tier of gpu-17:9464 is nearly full",
        description="10GiB are left in it, less than a fifth of what the tier holds.",
        quiet=[
            {
                tier("holdfast_tier_used_bytes", "remote"): f"{100 * GIB}x60",
                tier("holdfast_tier_free_bytes", "remote"): f"{21 * GIB}x60",
            },
            {  # empty, and nothing is known of it yet
                tier("holdfast_tier_used_bytes", "remote"): "0x60",
                tier("holdfast_tier_free_bytes", "remote"): "0x60",
            },
            {  # memory has alerts of its own
                tier("holdfast_tier_used_bytes", "peer"): "100x60",
                tier("holdfast_tier_free_bytes", "peer"): "0x60",
            },
        ],
    ),
    Case(
        alert="HoldfastMemoryNearlyUsed",
        severity="warning",
        fires={
            of("holdfast_memory_used_bytes"): "99x60",
            of("holdfast_memory_max_bytes"): "100x60",
        },
        at=20,
        labels=ON_NODE,
        summary="The memory for slots on gpu-17:9464 is nearly used up",
        description="99% of memory.bytes_max have been used for 15 minutes.",
        quiet=[
            {
                of("holdfast_memory_used_bytes"): "96x60",
                of("holdfast_memory_max_bytes"): "100x60",
            }
        ],
    ),
    Case(
        alert="HoldfastTmpfsTooFull",
        severity="warning",
        fires={
            of("holdfast_memory_used_bytes"): f"{4 * GIB}x60",
            of("holdfast_memory_max_bytes"): f"{10 * GIB}x60",
            of("holdfast_memory_tmpfs_free_bytes"): f"{5 * GIB}x60",
        },
        at=20,
        labels=ON_NODE,
        summary="The file system of memory.dir on gpu-17:9464 has less room than ckptd may use",
        description="5GiB are free in it, less than what is left of memory.bytes_max.",
        quiet=[
            {
                of("holdfast_memory_used_bytes"): f"{4 * GIB}x60",
                of("holdfast_memory_max_bytes"): f"{10 * GIB}x60",
                of("holdfast_memory_tmpfs_free_bytes"): f"{6 * GIB}x60",
            },
            {  # all is used, and nothing more is needed
                of("holdfast_memory_used_bytes"): f"{10 * GIB}x60",
                of("holdfast_memory_max_bytes"): f"{10 * GIB}x60",
                of("holdfast_memory_tmpfs_free_bytes"): "0x60",
            },
        ],
    ),
    Case(
        alert="HoldfastSlotsQuarantined",
        severity="warning",
        fires={of("holdfast_slots", 'state="quarantined"'): "0x9 2x60"},
        at=45,
        labels={**ON_NODE, "state": "quarantined"},
        summary="Slots on gpu-17:9464 wait for a process to end",
        description="Slots that cannot be used, as a process that let go of them has lived on for 30 minutes: 2.",
        quiet=[
            {of("holdfast_slots", 'state="quarantined"'): "0x9 2x20 0x60"},
            {of("holdfast_slots", 'state="free"'): "2x60"},
        ],
    ),
    Case(
        alert="HoldfastDamageFound",
        severity="warning",
        fires={
            **counted("holdfast_bad_copies_total", by=2),
            **counted("holdfast_lost_slots_total", by=1),
        },
        at=60,
        labels=ON_NODE,
        summary="Damaged copies were found",
        description="Copies that contradict their digests, or are gone, of which gpu-17:9464 heard within an hour: 3.",
        quiet=[
            {
                **counted("holdfast_bad_copies_total", by=0),
                **counted("holdfast_lost_slots_total", by=0),
            }
        ],
    ),
    Case(
        alert="HoldfastCopyUnmended",
        severity="warning",
        fires=counted("holdfast_unmended_copies_total", by=2),
        at=60,
        labels=ON_NODE,
        summary="A bad copy cannot be mended",
        description="Bad copies of jobs that gpu-17:9464 hosts, of which there is no good one: 2 within an hour.",
        quiet=[counted("holdfast_unmended_copies_total", by=0)],
    ),
    Case(
        alert="HoldfastScrubBehind",
        severity="warning",
        fires={of("holdfast_scrub_overdue_copies"): "3x100"},
        at=70,
        labels=ON_NODE,
        summary="Copies are not read again in time",
        description="Copies of gpu-17:9464 that were not read and verified within scrub.period_ms: 3.",
        quiet=[{of("holdfast_scrub_overdue_copies"): "0x100"}],
    ),
    Case(
        alert="HoldfastReplicasDiverged",
        severity="critical",
        fires=counted("holdfast_replicas_diverged_total", by=2),
        at=60,
        labels=ON_NODE,
        summary="Data-parallel replicas have diverged",
        description="Steps of jobs that gpu-17:9464 hosts, of which ranks hold the same tensors with other bytes: 2.",
        quiet=[counted("holdfast_replicas_diverged_total", by=0)],
    ),
    Case(
        alert="HoldfastRestoreFailed",
        severity="critical",
        fires=counted("holdfast_sessions_total", 'outcome="failed"'),
        at=60,
        labels={**ON_NODE, "outcome": "failed"},
        summary="Restores fail",
        description="Restores of jobs that gpu-17:9464 hosts, and that failed within an hour: 1.",
        quiet=[
            counted("holdfast_sessions_total", 'outcome="done"'),
            counted("holdfast_sessions_total", 'outcome="fell_back"'),
        ],
    ),
    Case(
        alert="HoldfastRestoreFellBack",
        severity="warning",
        fires=counted("holdfast_sessions_total", 'outcome="fell_back"'),
        at=60,
        labels={**ON_NODE, "outcome": "fell_back"},
        summary="Restores did not get what they were offered first",
        description="Times within an hour that a rank took its next copy, or all ranks went on with another step, in jobs "
        "that gpu-17:9464 hosts: 1.",
        quiet=[counted("holdfast_sessions_total", 'outcome="done"')],
    ),
]
