#include "server/runtime/daemon_metrics.h"

#include <set>

#include "client-lib/include/holdfast/version.h"

namespace holdfast {
namespace {

constexpr char kSaves[] = "holdfast_saves_total";
constexpr char kSavesHelp[] = "Saves of single ranks by outcome.";
constexpr char kSteps[] = "holdfast_steps_total";
constexpr char kStepsHelp[] =
    "Steps of jobs by outcome: committed by all ranks, retired when a newer one was committed, "
    "shed "
    "to make room, abandoned.";
constexpr char kSessions[] = "holdfast_sessions_total";
constexpr char kSessionsHelp[] =
    "Restore sessions by outcome; fell_back: a rank's next copy was used, or all ranks went on "
    "with "
    "another step.";
constexpr char kSlots[] = "holdfast_slots";
constexpr char kSlotsHelp[] = "Slots by state.";
constexpr double kMillisOfASecond = 1000;

double SecondsOf(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void DaemonMetrics::Running::AdvanceTo(double value) {
  if (value > last) {
    counter->Add(value - last);
    last = value;
  }
}

DaemonMetrics::DaemonMetrics(int64_t unix_ms)
    : saves_sealed_(registry_.AddCounter(kSaves, kSavesHelp, {{"outcome", "sealed"}})),
      saves_refused_(registry_.AddCounter(kSaves, kSavesHelp, {{"outcome", "refused"}})),
      sealed_bytes_(registry_.AddCounter("holdfast_sealed_bytes_total", "Bytes of sealed images.")),
      steps_committed_(registry_.AddCounter(kSteps, kStepsHelp, {{"outcome", "committed"}})),
      steps_shed_(registry_.AddCounter(kSteps, kStepsHelp, {{"outcome", "shed"}})),
      steps_retired_(registry_.AddCounter(kSteps, kStepsHelp, {{"outcome", "retired"}})),
      steps_abandoned_(registry_.AddCounter(kSteps, kStepsHelp, {{"outcome", "abandoned"}})),
      attempts_(registry_.AddCounter("holdfast_attempts_total", "Attempts opened.")),
      sessions_done_(registry_.AddCounter(kSessions, kSessionsHelp, {{"outcome", "done"}})),
      sessions_failed_(registry_.AddCounter(kSessions, kSessionsHelp, {{"outcome", "failed"}})),
      sessions_fell_back_(
          registry_.AddCounter(kSessions, kSessionsHelp, {{"outcome", "fell_back"}})),
      bad_copies_(
          registry_.AddCounter("holdfast_bad_copies_total",
                               "Copies whose bytes contradict their digests, or are gone.")),
      mended_copies_(registry_.AddCounter("holdfast_mended_copies_total",
                                          "Bad copies that were written anew from good ones.")),
      unmended_copies_(registry_.AddCounter(
          "holdfast_unmended_copies_total",
          "Bad copies of which no good one was found when it was looked for.")),
      diverged_(registry_.AddCounter(
          "holdfast_replicas_diverged_total",
          "Steps of which ranks hold the same tensors with other bytes, as found on their way to "
          "the remote tier.")),
      lost_slots_(registry_.AddCounter("holdfast_lost_slots_total",
                                       "Slots whose file was cut short or taken away.")),
      protocol_errors_(registry_.AddCounter(
          "holdfast_protocol_errors_total",
          "Client connections turned away or closed for breaking the protocol.")),
      troubles_(registry_.AddCounter(
          "holdfast_troubles_total",
          "Times that the node's memory or disk kept ckptd from what it was about to do.")),
      catalog_errors_(
          registry_.AddCounter("holdfast_catalog_errors_total", "Failed writes to the catalog.")),
      slots_(registry_.AddGauge(kSlots, kSlotsHelp, {{"state", "used"}})),
      slots_free_(registry_.AddGauge(kSlots, kSlotsHelp, {{"state", "free"}})),
      slots_quarantined_(registry_.AddGauge(kSlots, kSlotsHelp, {{"state", "quarantined"}})),
      memory_used_(registry_.AddGauge("holdfast_memory_used_bytes", "Size of all slots.")),
      memory_max_(registry_.AddGauge("holdfast_memory_max_bytes",
                                     "Budget for all slots (memory.bytes_max).")),
      memory_free_in_tmpfs_(registry_.AddGauge("holdfast_memory_tmpfs_free_bytes",
                                               "Free in the file system of memory.dir.")),
      connections_(registry_.AddGauge("holdfast_connections", "Client connections.")),
      held_{&registry_.AddCounter(
          "holdfast_background_held_seconds_total",
          "Time that background copying has waited, as processes said that their network is "
          "busy.")},
      problems_(registry_.AddGauge("holdfast_problems", "Lines among the problems of the status.")),
      scrub_bytes_{&registry_.AddCounter("holdfast_scrub_read_bytes_total",
                                         "Bytes of copies that the background scrub has read.")},
      scrub_copies_{&registry_.AddCounter("holdfast_scrub_copies_total",
                                          "Copies that the background scrub has verified.")},
      scrub_bad_{&registry_.AddCounter("holdfast_scrub_bad_copies_total",
                                       "Copies that the background scrub has found bad.")},
      scrub_oldest_(registry_.AddGauge(
          "holdfast_scrub_oldest_seconds",
          "Time since the copy was verified, or written, of which that is longest ago.")),
      scrub_overdue_(registry_.AddGauge("holdfast_scrub_overdue_copies",
                                        "Copies that were not read again within scrub.period_ms.")),
      peer_(AddTierCounters(TierKind::kPeer)),
      nvme_(AddTierCounters(TierKind::kNvme)),
      remote_(AddTierCounters(TierKind::kRemote)),
      handle_(registry_.AddHistogram("holdfast_core_handle_seconds",
                                     "Time that the control logic took for one event.",
                                     {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0})),
      saves_(registry_),
      steps_(registry_),
      transfers_(registry_),
      jobs_(registry_) {
  registry_
      .AddGauge("holdfast_build_info", "1, with the version as a label.",
                {{"version", HOLDFAST_VERSION_STRING}})
      .Set(1);
  registry_.AddGauge("holdfast_start_time_seconds", "Unix time at which the daemon started.")
      .Set(static_cast<double>(unix_ms) / kMillisOfASecond);
}

void DaemonMetrics::Count(const Report& report, int64_t unix_ms) {
  steps_.Count(report, unix_ms);
  switch (report.kind) {
    case Report::Kind::kShardSealed:
      saves_sealed_.Add(1);
      sealed_bytes_.Add(static_cast<double>(report.bytes));
      return;
    case Report::Kind::kSaveRefused:
      return saves_refused_.Add(1);
    case Report::Kind::kStepCommitted:
      return steps_committed_.Add(1);
    case Report::Kind::kStepShed:
      return steps_shed_.Add(1);
    case Report::Kind::kStepRetired:
      return steps_retired_.Add(1);
    case Report::Kind::kStepAbandoned:
      return steps_abandoned_.Add(1);
    case Report::Kind::kAttemptOpened:
      return attempts_.Add(1);
    case Report::Kind::kSessionDone:
      return sessions_done_.Add(1);
    case Report::Kind::kSessionFailed:
      return sessions_failed_.Add(1);
    case Report::Kind::kSessionFellBack:
      return sessions_fell_back_.Add(1);
    case Report::Kind::kCopyBad:
      return bad_copies_.Add(1);
    case Report::Kind::kCopyMended:
      return mended_copies_.Add(1);
    case Report::Kind::kCopyUnmended:
      return unmended_copies_.Add(1);
    case Report::Kind::kSlotLost:
      return lost_slots_.Add(1);
    case Report::Kind::kTierCommitted:
      return CountersOf(report.tier).commits.Add(1);
    case Report::Kind::kTierShed:
      return CountersOf(report.tier).shed.Add(1);
    case Report::Kind::kTierTrouble:
      return CountersOf(report.tier).troubles.Add(1);
    case Report::Kind::kTierRemoved:
      return CountersOf(report.tier).removals.Add(1);
    case Report::Kind::kReplicasDiverged:
      return diverged_.Add(1);
    case Report::Kind::kProtocolError:
      return protocol_errors_.Add(1);
    case Report::Kind::kTrouble:
      return troubles_.Add(1);
    case Report::Kind::kSessionDecided:
    case Report::Kind::kSlotQuarantined:
    case Report::Kind::kSlotReleased:
    case Report::Kind::kJobRemoved:
    case Report::Kind::kCopyGood:
    case Report::Kind::kTierWell:
    case Report::Kind::kJobStopping:
      return;  // in the log only; the slots' gauges show the rest
  }
}

void DaemonMetrics::Set(const v1::DaemonStatus& status) {
  slots_.Set(status.slots() - status.slots_free() - status.slots_quarantined());
  slots_free_.Set(status.slots_free());
  slots_quarantined_.Set(status.slots_quarantined());
  memory_used_.Set(static_cast<double>(status.memory_bytes_used()));
  memory_max_.Set(static_cast<double>(status.memory_bytes_max()));
  memory_free_in_tmpfs_.Set(static_cast<double>(status.memory_bytes_free_in_tmpfs()));
  connections_.Set(status.connections());
  held_.AdvanceTo(static_cast<double>(status.quiet().held_ms()) / kMillisOfASecond);
  problems_.Set(status.problems_size());
  const v1::ScrubStatus& scrub = status.scrub();
  scrub_bytes_.AdvanceTo(static_cast<double>(scrub.bytes_read()));
  scrub_copies_.AdvanceTo(static_cast<double>(scrub.copies_read()));
  scrub_bad_.AdvanceTo(static_cast<double>(scrub.copies_bad()));
  scrub_oldest_.Set(scrub.oldest_unix_ms() == 0
                        ? 0
                        : static_cast<double>(status.unix_ms() - scrub.oldest_unix_ms()) /
                              kMillisOfASecond);
  scrub_overdue_.Set(static_cast<double>(scrub.overdue()));
  for (const v1::TierStatus& tier : status.tiers()) {
    SetTier(tier);
  }
}

void DaemonMetrics::SetJobs(const v1::GetStatusReply& status, int64_t unix_ms) {
  jobs_.Set(status.jobs(), unix_ms);
  std::set<std::string> names;
  for (const v1::JobStatus& job : status.jobs()) {
    names.insert(job.name());
  }
  steps_.KeepOnly(names);
}

DaemonMetrics::TierCounters& DaemonMetrics::CountersOf(TierKind tier) {
  switch (tier) {
    case TierKind::kPeer:
      return peer_;
    case TierKind::kNvme:
      return nvme_;
    default:
      return remote_;
  }
}

DaemonMetrics::TierCounters DaemonMetrics::AddTierCounters(TierKind tier) {
  const auto add = [&](const char* name, const char* help) -> Counter& {
    return registry_.AddCounter(name, help, {{"tier", std::string(TierName(tier))}});
  };
  return {
      add("holdfast_tier_commits_total", "Steps that became whole in a tier."),
      add("holdfast_tier_shed_total", "Steps that were due in a tier and gave way to newer ones."),
      add("holdfast_tier_troubles_total",
          "Times that a tier failed, was full, or stalled; flushes try again by themselves."),
      add("holdfast_tier_removals_total", "Steps that retention took out of a tier.")};
}

void DaemonMetrics::Set(const ClusterView& cluster) {
  if (cluster_.member == nullptr) {
    cluster_.member = &registry_.AddGauge(
        "holdfast_cluster_member",
        "1 while this node is a member of its cluster: its lease holds, or it needs none.");
    cluster_.members =
        &registry_.AddGauge("holdfast_cluster_members", "Nodes that live, as this one last heard.");
    cluster_.reached = &registry_.AddGauge("holdfast_cluster_nodes_reached",
                                           "Other nodes to which the last that was said got.");
    cluster_.problems = &registry_.AddGauge(
        "holdfast_cluster_problems", "Lines about the cluster among the problems of the status.");
  }
  cluster_.member->Set(cluster.member ? 1 : 0);
  cluster_.members->Set(static_cast<double>(cluster.members));
  cluster_.reached->Set(static_cast<double>(cluster.reached));
  cluster_.problems->Set(static_cast<double>(cluster.problems.size()));
}

void DaemonMetrics::SetTier(const v1::TierStatus& tier) {
  TierGauges& gauges = tiers_[tier.tier()];
  if (gauges.used == nullptr) {
    const auto add = [&](const char* name, const char* help) {
      return &registry_.AddGauge(name, help, {{"tier", tier.tier()}});
    };
    gauges.used = add("holdfast_tier_used_bytes", "Copies in the tier, and what is being written.");
    gauges.max = add("holdfast_tier_max_bytes", "The tier's budget; 0: none of ours.");
    gauges.free = add("holdfast_tier_free_bytes", "Free in the tier's file systems, as last seen.");
    gauges.flushes = add("holdfast_tier_flushes", "Shards on their way into the tier.");
    gauges.stalled = add("holdfast_tier_stalled", "Operations that have got nowhere for a while.");
    gauges.healthy = add("holdfast_tier_healthy", "1 when the tier's last operations went well.");
    const auto count = [&](const char* name, const char* help) {
      return &registry_.AddCounter(name, help, {{"tier", tier.tier()}});
    };
    gauges.written.counter = count("holdfast_tier_written_bytes_total", "Written to the tier.");
    gauges.read.counter = count("holdfast_tier_read_bytes_total", "Read from the tier.");
    gauges.shared.counter =
        count("holdfast_tier_shared_bytes_total",
              "Not written to the tier, as other ranks' files have the same bytes.");
    gauges.compressed_away.counter =
        count("holdfast_tier_compressed_away_bytes_total",
              "Not written to the tier, as what was written is compressed.");
  }
  gauges.used->Set(static_cast<double>(tier.bytes_used()));
  gauges.max->Set(static_cast<double>(tier.bytes_max()));
  gauges.free->Set(static_cast<double>(tier.bytes_free()));
  gauges.flushes->Set(tier.flushes());
  gauges.stalled->Set(tier.stalled());
  gauges.healthy->Set(tier.healthy() ? 1 : 0);
  gauges.written.AdvanceTo(static_cast<double>(tier.bytes_written()));
  gauges.read.AdvanceTo(static_cast<double>(tier.bytes_read()));
  gauges.shared.AdvanceTo(static_cast<double>(tier.bytes_shared()));
  gauges.compressed_away.AdvanceTo(static_cast<double>(tier.bytes_compressed_away()));
}

DaemonMetrics::PlaceMetrics& DaemonMetrics::MetricsOf(const DurableTiers::PlaceState& place) {
  PlaceMetrics& metrics = places_[{place.tier, place.dir}];
  if (metrics.healthy != nullptr) {
    return metrics;
  }
  const Metrics::Labels labels = {{"tier", std::string(TierName(place.tier))},
                                  {"directory", place.dir}};
  const auto gauge = [&](const char* name, const char* help) {
    return &registry_.AddGauge(name, help, labels);
  };
  const auto count = [&](const char* name, const char* help) {
    return Running{&registry_.AddCounter(name, help, labels)};
  };
  metrics.healthy = gauge("holdfast_drive_healthy",
                          "1 when the last operation on a drive, or the remote mount, went well.");
  metrics.free = gauge("holdfast_drive_free_bytes", "Free in its file system, as last seen.");
  metrics.written_bytes = count("holdfast_drive_written_bytes_total", "Written to it.");
  metrics.write_seconds =
      count("holdfast_drive_write_seconds_total",
            "Time that writing shards there took, publication included, all together.");
  metrics.writes = count("holdfast_drive_writes_total", "Shards written there, or begun.");
  metrics.read_bytes = count("holdfast_drive_read_bytes_total", "Read from it.");
  metrics.read_seconds =
      count("holdfast_drive_read_seconds_total", "Time that reading there took, all together.");
  metrics.reads = count("holdfast_drive_reads_total", "Shards, or parts of them, read there.");
  return metrics;
}

void DaemonMetrics::Set(const std::vector<DurableTiers::PlaceState>& places) {
  for (const DurableTiers::PlaceState& place : places) {
    PlaceMetrics& metrics = MetricsOf(place);
    const TierPlace::Health& health = place.health;
    metrics.healthy->Set(health.problem.empty() ? 1 : 0);
    metrics.free->Set(static_cast<double>(health.bytes_free));
    metrics.written_bytes.AdvanceTo(static_cast<double>(health.written.bytes));
    metrics.write_seconds.AdvanceTo(SecondsOf(health.written.took));
    metrics.writes.AdvanceTo(static_cast<double>(health.written.operations));
    metrics.read_bytes.AdvanceTo(static_cast<double>(health.read.bytes));
    metrics.read_seconds.AdvanceTo(SecondsOf(health.read.took));
    metrics.reads.AdvanceTo(static_cast<double>(health.read.operations));
  }
}

}  // namespace holdfast
