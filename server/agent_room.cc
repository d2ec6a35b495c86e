// Which slot a save gets, and how room is made (docs/protocol.md §3 and §5).
#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "server/agent.h"
#include "server/holders.h"

namespace holdfast {

void Agent::Settle(EventTime time) {
  time_ = time;
  std::vector<JobUuid> removing;
  for (const auto& [job, removal] : removals_) {
    removing.push_back(job);
  }
  for (const JobUuid& job : removing) {
    AdvanceRemoval(job);
  }
  if (rebuild_ && rebuild_->told && messages_.empty()) {
    AnswerRebuild();
  }
  if (!std::exchange(slots_changed_, false)) {
    AdvanceLoads();
    AdvancePrefetches();
    return AdvanceReplicas();
  }
  prefetch_due_ = replicas_due_ = loads_due_ = true;
  const std::set<RequestToken> waiting = waiting_for_room_;
  for (const RequestToken token : waiting) {
    const Pending* pending = FindPending(token);
    if (pending == nullptr) {
      continue;
    }
    if (pending->where == Where::kReserve) {
      PlaceReserve(token);
    } else if (pending->where == Where::kRoom) {
      pending_.at(token).asked.clear();
      pending->fetch ? PlaceFetch(token) : Place(token);
    }
  }
  AdvanceLoads();
  AdvancePrefetches();
  AdvanceReplicas();
}

bool Agent::Fits(const Slot& slot, uint64_t bytes) const {
  return slot.bytes >= bytes && slot.bytes / 2 <= bytes;
}

// It only waits for others to end or let go. Such a slot counts for the budget, but not for its
// rank, which cannot help it.
bool Agent::Stuck(const Slot& slot, const Seat& seat) const {
  const bool foreign_writer = slot.writer && *slot.writer != seat.process;
  switch (slot.state) {
    case SlotState::kQuarantined:
    case SlotState::kDeleting:
      return true;
    case SlotState::kFree:
      return foreign_writer;
    case SlotState::kUnpublishing:
      return foreign_writer ||
             (!slot.removing && (!slot.readers.empty() || !slot.admin_readers.empty()));
    case SlotState::kNoting:
    case SlotState::kWriting:
    case SlotState::kPublishing:
      return foreign_writer && slot.lost.has_value();
    case SlotState::kFetching:
      return slot.lost.has_value();
    default:
      return false;
  }
}

bool Agent::MineFree(const Slot& slot, const Seat& seat) const {
  return slot.state == SlotState::kFree && slot.owned && !slot.lent && slot.job == seat.job &&
         slot.rank == seat.rank && (!slot.writer || *slot.writer == seat.process);
}

bool Agent::Orphan(const Slot& slot) const {
  return jobs_.count(slot.job) == 0 || !AnySeatOf(slot.job, slot.rank);
}

bool Agent::AnySeatOf(const JobUuid& job, Rank rank) const {
  const std::set<SeatId>& seats = seats_.OfRank(job, rank);
  return std::any_of(seats.begin(), seats.end(),
                     [&](SeatId id) { return !seats_.Find(id)->superseded; });
}

bool Agent::Deletable(const Slot& slot) const {
  return slot.state == SlotState::kFree && !slot.writer && !HeldByAnybody(slot);
}

// Whether the slot, once it is empty and nobody has it mapped, is deleted when this seat is short
// of memory: those that the rank itself cannot use, those whose rank is gone, and those that were
// made ahead of a restore. What a living
// rank of any job has it will fill again.
bool Agent::Dispensable(const Slot& slot, const Seat& seat, uint64_t bytes) const {
  const bool mine = slot.owned && slot.job == seat.job && slot.rank == seat.rank;
  return slot.extra || (mine ? slot.bad || !Fits(slot, bytes) : Orphan(slot));
}

// Bytes that were another user's are never handed on.
bool Agent::Adoptable(const Slot& slot, const Seat& seat) const {
  return Deletable(slot) && slot.uid == seat.uid && !slot.lent && Orphan(slot);
}

// Slots that wait for others are made up for by as many again as a rank may have: without that
// limit, whoever reads one copy after the other would draw the whole budget into one rank.
uint32_t Agent::CountForRank(const Seat& seat) const {
  uint32_t usable = 0;
  uint32_t stuck = 0;
  for (const auto& [id, slot] : slots_) {
    if (slot.owned && slot.job == seat.job && slot.rank == seat.rank && !slot.extra) {
      ++(Stuck(slot, seat) ? stuck : usable);
    }
  }
  return usable + stuck - std::min(stuck, config_.memory().slots_per_rank());
}

// The slots of each rank of the job that it can use, now or when what it holds is given up.
std::map<Rank, uint64_t> Agent::SlotsByRank(const JobUuid& job) const {
  std::map<Rank, uint64_t> slots;
  for (const auto& [id, slot] : slots_) {
    const bool others =
        slot.writer && slot.state != SlotState::kSealed && !IsMember(job, slot.rank, *slot.writer);
    if (slot.owned && slot.job == job && !others && !slot.extra &&
        slot.state != SlotState::kQuarantined && slot.state != SlotState::kDeleting) {
      ++slots[slot.rank];
    }
  }
  return slots;
}

bool Agent::OthersCanHaveTwo(const Seat& seat, uint64_t bytes, uint64_t bytes_left) const {
  // (In a cluster: of the ranks that are here. Those on other nodes want none of this memory.)
  const uint64_t ranks = clustered() ? RanksHere(seat.job) : seat.world_size;
  uint64_t wanting = 2 * (std::max<uint64_t>(ranks, 1) - 1);
  for (const auto& [rank, slots] : SlotsByRank(seat.job)) {
    if (clustered() && !AnySeatOf(seat.job, rank)) {
      continue;
    }
    wanting -= rank != seat.rank && rank < seat.world_size ? std::min<uint64_t>(slots, 2) : 0;
  }
  return wanting <= bytes_left / bytes;
}

// Of the slots of this user's jobs; replicas of other nodes' are nobody's here.
uint64_t Agent::BytesOf(uint32_t uid) const {
  uint64_t bytes = 0;
  for (const auto& [id, slot] : slots_) {
    bytes += slot.owned && !slot.lent && slot.uid == uid ? slot.bytes + slot.beside : 0;
  }
  return bytes;
}

uint64_t Agent::UserBytesMax() const {
  const uint64_t max = config_.memory().bytes_per_uid_max();
  return max == 0 ? bytes_max_ : std::min(max, bytes_max_);
}

std::string Agent::UserBytesMaxText() const {
  const bool own = UserBytesMax() < bytes_max_;
  return absl::StrCat(FormatBytes(UserBytesMax()),
                      own ? " (memory.bytes_per_uid_max)" : " (memory.bytes_max)");
}

bool Agent::MemoryHas(uint32_t uid, uint64_t bytes) const {
  return bytes_used_ + bytes <= bytes_max_ && BytesOf(uid) + bytes <= UserBytesMax();
}

// A rank's third slot and any further one is made only while every other rank of the job could
// still have two.
bool Agent::BudgetHas(const Seat& seat, uint64_t bytes, uint32_t count) const {
  if (!MemoryHas(seat.uid, bytes) || slots_.size() >= config_.memory().slots_max()) {
    return false;
  }
  return count < 2 || OthersCanHaveTwo(seat, bytes, bytes_max_ - bytes_used_ - bytes);
}

// Deletes free slots that are of no use: the rank's own of the wrong size, then those whose rank is
// gone, and, for a rank that has not got two, those that others of its job have beyond two. True if
// memory is on its way back.
bool Agent::MakeSpace(const Seat& seat, uint64_t bytes) {
  uint64_t coming = 0;
  uint64_t coming_of_user = 0;
  const auto count = [&](const Slot& slot) {
    const uint64_t has = slot.bytes + slot.beside;
    coming += has;
    coming_of_user += slot.owned && !slot.lent && slot.uid == seat.uid ? has : 0;
  };
  for (const auto& [id, slot] : slots_) {
    const bool emptied = slot.state == SlotState::kUnpublishing && !slot.writer &&
                         slot.readers.empty() && slot.admin_readers.empty();
    if (slot.state == SlotState::kDeleting || (emptied && (slot.extra || Orphan(slot)))) {
      count(slot);
    }
  }
  const uint64_t of_user = BytesOf(seat.uid);
  const auto node_has = [&] { return bytes_used_ - coming + bytes <= bytes_max_; };
  const auto enough = [&] {
    return node_has() && of_user - coming_of_user + bytes <= UserBytesMax();
  };
  std::map<Rank, uint64_t> has = SlotsByRank(seat.job);
  std::vector<Slot*> victims;
  for (auto& [id, slot] : slots_) {
    const bool mine = slot.owned && slot.job == seat.job && slot.rank == seat.rank;
    if (!Deletable(slot)) {
      continue;
    }
    if (Dispensable(slot, seat, bytes)) {
      victims.push_back(&slot);
    } else if (!mine && slot.job == seat.job && has[seat.rank] < 2 && has[slot.rank] > 2) {
      --has[slot.rank];
      victims.push_back(&slot);
    }
  }
  std::stable_sort(victims.begin(), victims.end(), [&](const Slot* a, const Slot* b) {
    const bool a_mine = a->job == seat.job && a->rank == seat.rank;
    const bool b_mine = b->job == seat.job && b->rank == seat.rank;
    return a_mine != b_mine ? a_mine : a->bytes > b->bytes;
  });
  const bool over_count = CountForRank(seat) >= config_.memory().slots_per_rank();
  bool own_deleted = false;
  for (Slot* slot : victims) {
    const bool mine = slot->job == seat.job && slot->rank == seat.rank;
    if (slot->uid != seat.uid && node_has()) {
      continue;  // the user's own limit is reached: what others have does not help
    }
    if (mine ? (over_count && !own_deleted) || !enough() : !over_count && !enough()) {
      own_deleted = own_deleted || mine;
      count(*slot);
      Delete(*slot);
    }
  }
  return own_deleted || (!over_count && coming > 0 && enough());
}

// Once mapped, a slot is the process's for good: so a third one is taken only as if it was made.
bool Agent::MayMap(const Seat& seat, uint64_t bytes) const {
  const auto mapped = std::count_if(slots_.begin(), slots_.end(), [&](const auto& s) {
    const Slot& slot = s.second;
    return slot.owned && slot.job == seat.job && slot.rank == seat.rank &&
           slot.writer == seat.process;
  });
  return mapped < 2 ||
         OthersCanHaveTwo(seat, bytes, bytes_max_ - std::min(bytes_max_, bytes_used_));
}

Agent::Allocation Agent::Allocate(const Seat& seat, const Pending& pending, RequestToken token) {
  // 1. A free slot of the rank's own.
  const bool may_map = MayMap(seat, pending.bytes);
  Slot* best = nullptr;
  for (auto& [id, slot] : slots_) {
    if (MineFree(slot, seat) && Fits(slot, pending.bytes) && (slot.writer || may_map) &&
        (best == nullptr || std::tuple(slot.failures, !slot.populated, slot.bytes) <
                                std::tuple(best->failures, !best->populated, best->bytes))) {
      best = &slot;
    }
  }
  if (best != nullptr) {
    return {best, false, Limit::kNone};
  }
  // 2. A new one, or one that an ended rank of the same user left behind.
  const uint32_t count = CountForRank(seat);
  const bool may_have_more = count < config_.memory().slots_per_rank();
  if (may_have_more && !pending.no_create && BudgetHas(seat, pending.bytes, count)) {
    CreateSlotFor(seat, pending.bytes, false, token);
    return {nullptr, true, Limit::kNone};
  }
  if (may_have_more) {
    for (auto& [id, slot] : slots_) {
      if (Fits(slot, pending.bytes) && Adoptable(slot, seat)) {
        return {&slot, false, Limit::kNone};
      }
    }
  }
  // 3. One that is on its way.
  bool coming = MakeSpace(seat, pending.bytes);
  for (const auto& [id, slot] : slots_) {
    const bool of_use = Fits(slot, pending.bytes) ||
                        !slot.writer;  // of the wrong size: deleted, and another one made
    if (!slot.owned || slot.job != seat.job || slot.rank != seat.rank || !of_use || slot.extra ||
        Stuck(slot, seat)) {
      continue;
    }
    coming =
        coming || slot.state == SlotState::kPopulating || slot.state == SlotState::kHanding ||
        slot.state == SlotState::kUnpublishing ||
        (slot.state == SlotState::kCreating && slot.token == 0 && !slot.ahead) ||
        ((slot.state == SlotState::kPublishing || slot.state == SlotState::kNoting) && slot.lost);
  }
  const bool user_full =
      BytesOf(seat.uid) + pending.bytes > UserBytesMax() && UserBytesMax() < bytes_max_;
  return {nullptr, coming,
          !may_have_more ? Limit::kRank
          : user_full    ? Limit::kUser
                         : Limit::kBudget};
}

void Agent::Place(RequestToken token) {
  Pending& pending = pending_.at(token);
  const Seat* seat = FindSeat(pending.seat);
  if (seat == nullptr) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "the rank has joined again since"});
  }
  const Allocation got = Allocate(*seat, pending, token);
  if (got.slot != nullptr) {
    return StartFilling(*got.slot, token);
  }
  if (got.coming) {
    if (got.limit == Limit::kNone) {
      pending.where = Where::kSlot;  // a slot is being made for it
    }
    return;
  }
  pending.limit = got.limit;
  const bool room = TakeFromPrefetches(*seat, pending.bytes, got.limit) ||
                    TakeFromReplicas(pending.bytes, got.limit) || AskForRoom(token, *seat);
  if (!room && !pending.may_wait) {
    return RefuseSave(token, NoRoom(pending, *seat));
  }
  if (!room) {
    room_again_ = room_again_.value_or(time_.now + kRoomLook);
  }
}

std::vector<EvictionAsk> Agent::WhomToAsk(const Pending& pending, const Seat& seat) const {
  if (pending.limit == Limit::kRank) {
    return {{seat.job, EvictionStage::kSpare}, {seat.job, EvictionStage::kLast}};
  }
  const EvictionRules rules{bytes_max_,
                            std::chrono::milliseconds(config_.memory().keep_ended_ms())};
  std::vector<EvictionAsk> order = EvictionOrder(
      {seat.job, seat.uid, pending.limit == Limit::kUser}, JobsInMemory(), rules, time_.now);
  if (MemoryHas(seat.uid, pending.bytes)) {
    // A slot could not be made although there is room: nobody's last copy would help.
    std::erase_if(order, [&](const EvictionAsk& ask) {
      return ask.job != seat.job &&
             (ask.stage == EvictionStage::kLast || ask.stage == EvictionStage::kDraining);
    });
  }
  return order;
}

// But for what is on its way out, and what is kept here for other nodes.
std::vector<MemoryJob> Agent::JobsInMemory() const {
  struct Held {
    uint64_t bytes = 0;
    int64_t saved_unix_ms = 0;
  };
  std::map<JobUuid, Held> held;
  for (const auto& [id, slot] : slots_) {
    const bool goes = slot.state == SlotState::kUnpublishing || slot.state == SlotState::kDeleting;
    if (slot.owned && !slot.lent && !goes) {
      Held& of_job = held[slot.job];
      of_job.bytes += slot.bytes + slot.beside;
      of_job.saved_unix_ms = std::max(of_job.saved_unix_ms, slot.copy.sealed_unix_ms);
    }
  }
  std::vector<MemoryJob> jobs;
  for (const auto& [uuid, of_job] : held) {
    const auto known = jobs_.find(uuid);
    if (known == jobs_.end()) {
      continue;
    }
    const int64_t ago_ms = std::max<int64_t>(time_.unix_ms - of_job.saved_unix_ms, 0);
    const MonotonicTime saved = {time_.now.ns - std::min(time_.now.ns, ago_ms * 1'000'000)};
    const EndedJobs::End end = ended_jobs_.Of(uuid, saved, time_.now);
    jobs.push_back({uuid, known->second.uid, of_job.bytes, AnyRankAlive(known->second),
                    HasExtra(uuid), end.in_order, end.at});
  }
  return jobs;
}

// False: it has nothing to give up that would make room.
bool Agent::Ask(const EvictionAsk& ask, RequestToken token, Pending& pending, const Seat& seat) {
  const auto known = jobs_.find(ask.job);
  if (known == jobs_.end() || (ask.job != seat.job && !Told(known->second))) {
    return false;
  }
  std::vector<CheckpointId> useful = Useful(ask.job, seat, pending.bytes, pending.limit);
  const bool last = ask.stage == EvictionStage::kLast;
  if (ask.job != seat.job) {
    if (useful.empty()) {
      return false;
    }
    // (What users call their jobs is nobody else's to know.)
    Send(ask.job, SpareAsked{token, JobName(known->second.uid == seat.uid ? seat.job : ask.job),
                             std::move(useful), static_cast<uint32_t>(ask.stage)});
  } else if (pending.fetch) {
    if (useful.empty() || last) {
      return false;
    }
    Send(seat.job, FetchRoomAsked{token, pending.fetch->checkpoint, std::move(useful)});
  } else {
    std::vector<RoomAsked::Left> left = LeftHere(seat, pending.bytes, pending.limit);
    if (useful.empty() && left.empty()) {
      return false;
    }
    Send(seat.job, RoomAsked{token, seat.attempt, seat.rank, pending.step, std::move(useful),
                             std::move(left), !last});
  }
  return true;
}

// The job itself and, if the memory of the node or of the user is full, others, one after the other
// (recovery/eviction.h). False: nobody is left to ask.
bool Agent::AskForRoom(RequestToken token, const Seat& seat) {
  Pending& pending = pending_.at(token);
  for (const EvictionAsk& ask : WhomToAsk(pending, seat)) {
    const bool last = ask.stage == EvictionStage::kLast || ask.stage == EvictionStage::kDraining;
    if (pending.asked.count(ask) > 0 ||
        (last && ask.job != seat.job && !LastCopiesSuffice(pending, seat))) {
      continue;
    }
    if (Ask(ask, token, pending, seat)) {
      pending.where = Where::kAsking;
      pending.asking = ask;
      return true;
    }
    pending.asked.insert(ask);
  }
  return false;
}

// Whether there is room when all those slots have gone, and what is on its way out.
bool Agent::Suffices(const Pending& pending, const Seat& seat,
                     const std::function<bool(const Slot&)>& goes) const {
  uint64_t freed = 0;
  uint64_t freed_of_user = 0;
  for (const auto& [id, slot] : slots_) {
    const bool free_of_use = !slot.writer && slot.readers.empty() && slot.admin_readers.empty();
    const bool emptied =
        slot.state == SlotState::kUnpublishing && free_of_use && (slot.extra || Orphan(slot));
    const bool given = slot.state == SlotState::kSealed && !slot.lent && free_of_use && goes(slot);
    if (slot.state == SlotState::kDeleting || emptied || given) {
      const uint64_t bytes = slot.bytes + slot.beside;
      freed += bytes;
      freed_of_user += slot.owned && !slot.lent && slot.uid == seat.uid ? bytes : 0;
    }
  }
  return bytes_used_ - freed + pending.bytes <= bytes_max_ &&
         BytesOf(seat.uid) - freed_of_user + pending.bytes <= UserBytesMax();
}

// Nobody's last copy goes in vain: those that have not said no are enough. (What durable tiers have
// went before.)
bool Agent::LastCopiesSuffice(const Pending& pending, const Seat& seat) const {
  std::set<JobUuid> ended;
  for (const EvictionAsk& ask : WhomToAsk(pending, seat)) {
    const bool last = ask.stage == EvictionStage::kLast || ask.stage == EvictionStage::kDraining;
    if (last && ask.job != seat.job && pending.asked.count(ask) == 0) {
      ended.insert(ask.job);
    }
  }
  return Suffices(pending, seat, [&](const Slot& slot) { return ended.count(slot.job) > 0; });
}

// There will be room when what ended jobs have is in a durable tier.
bool Agent::RoomMayCome(const Pending& pending, const Seat& seat) const {
  if (pending.limit == Limit::kRank) {
    return false;
  }
  std::set<JobUuid> ended;
  for (const EvictionAsk& ask : WhomToAsk(pending, seat)) {
    if (ask.job != seat.job && ask.stage != EvictionStage::kSpare) {
      ended.insert(ask.job);
    }
  }
  return Suffices(pending, seat, [&](const Slot& slot) {
    return ended.count(slot.job) > 0 && !slot.drains.empty();
  });
}

// The checkpoints of `job` that would make room here, now, if they were given up.
std::vector<CheckpointId> Agent::Useful(const JobUuid& job, const Seat& seat, uint64_t bytes,
                                        Limit limit) const {
  std::vector<CheckpointId> useful;
  // Of another user's job that runs only what was brought here ahead of a restore.
  const auto known = jobs_.find(job);
  const bool only_extra =
      known != jobs_.end() && known->second.uid != seat.uid && AnyRankAlive(known->second);
  for (auto it = shards_.lower_bound({job, 0, 0, 0}); it != shards_.end() && it->first.job == job;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.state != SlotState::kSealed || slot.lent || (slot.extra && limit == Limit::kRank) ||
        (only_extra && !slot.extra)) {
      continue;
    }
    const bool mine = slot.job == seat.job && slot.rank == seat.rank;
    const bool unread = slot.readers.empty() && slot.admin_readers.empty();
    const bool reusable = mine && unread && !slot.bad &&
                          (!slot.writer || *slot.writer == seat.process) && Fits(slot, bytes);
    const bool deletable = unread && !slot.writer && Dispensable(slot, seat, bytes);
    // Kept by a reader, an old process or a bad file, it no longer counts for the rank: another
    // slot can be made, if there is memory.
    const bool stuck_then = !unread || slot.bad || (slot.writer && *slot.writer != seat.process);
    const bool another = mine && stuck_then && MemoryHas(seat.uid, bytes);
    if (reusable || deletable || (limit == Limit::kRank && another)) {
      if (limit != Limit::kRank || mine) {
        useful.push_back(it->first.checkpoint());
      }
    }
  }
  useful.erase(std::unique(useful.begin(), useful.end()), useful.end());
  return useful;
}

// Copies that would make room and are of ranks which run on other nodes, or nowhere.
std::vector<RoomAsked::Left> Agent::LeftHere(const Seat& seat, uint64_t bytes, Limit limit) const {
  std::vector<RoomAsked::Left> left;
  if (!clustered() || limit == Limit::kRank) {
    return left;
  }
  for (auto it = shards_.lower_bound({seat.job, 0, 0, 0});
       it != shards_.end() && it->first.job == seat.job && left.size() < kLeftMax; ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.state == SlotState::kSealed && !slot.lent && slot.readers.empty() &&
        slot.admin_readers.empty() && !slot.writer && Dispensable(slot, seat, bytes) &&
        !AnySeatOf(seat.job, slot.rank)) {
      left.push_back({it->first.checkpoint(), it->first.rank});
    }
  }
  return left;
}

std::map<JobUuid, uint64_t> Agent::BytesByJob() const {
  std::map<JobUuid, uint64_t> bytes;
  for (const auto& [id, slot] : slots_) {
    if (slot.owned) {
      bytes[slot.job] += slot.bytes + slot.beside;
    }
  }
  return bytes;
}

namespace {

// " by pid 4711, pid 4712 and others"
std::string NameSome(const std::set<std::string>& names) {
  constexpr size_t kNamedMax = 3;
  std::string text;
  size_t named = 0;
  for (const std::string& name : names) {
    if (++named > kNamedMax) {
      return text + " and others";
    }
    absl::StrAppend(&text, named == 1 ? " by " : ", ", name);
  }
  return text;
}

}  // namespace

// Who has the memory, and what would free it.
std::string Agent::HoldersHere(const Pending& pending, const Seat& seat) const {
  std::vector<Holder> holders;
  std::optional<std::string> ended;  // a job of this user that has
  uint64_t named = 0;
  for (const auto& [job, bytes] : BytesByJob()) {
    const auto known = jobs_.find(job);
    if (known != jobs_.end() && known->second.uid == seat.uid) {
      holders.push_back({known->second.name, bytes, true});
      named += bytes;
      ended = !ended && !AnyRankAlive(known->second) ? known->second.name : ended;
    }
  }
  holders.push_back({"", bytes_used_ - named, false});
  std::string text = HoldersText(std::move(holders));
  if (ended) {
    absl::StrAppend(&text, "; 'ckptctl rm ", *ended,
                    " --yes' frees what that ended job of yours holds");
  } else {
    absl::StrAppend(&text, "; it takes a larger memory.",
                    pending.limit == Limit::kUser ? "bytes_per_uid_max" : "bytes_max",
                    ", or fewer jobs at a time");
  }
  uint64_t of_dead = 0;
  for (const MemoryJob& job : JobsInMemory()) {
    of_dead += job.uid != seat.uid && DiedLately(job, time_.now) ? job.bytes : 0;
  }
  if (of_dead > 0 && pending.limit == Limit::kBudget &&
      (HasTier(TierKind::kNvme) || HasTier(TierKind::kRemote))) {
    absl::StrAppend(&text, "; jobs of other users that died hold ", FormatBytes(of_dead),
                    "; what nvme or remote has too gives way ten minutes after that");
  }
  return text;
}

Failure Agent::NoRoom(const Pending& pending, const Seat& seat) const {
  uint32_t copies = 0;
  uint32_t filling = 0;
  uint32_t waiting = 0;
  uint32_t held = 0;
  std::set<std::string> readers;
  for (const auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != seat.job || slot.rank != seat.rank) {
      continue;
    }
    for (const ReadHold& hold : slot.readers) {
      readers.insert(hold.process.ToString());
    }
    if (!slot.admin_readers.empty()) {
      readers.insert("a verification or another node");
    }
    copies += slot.state == SlotState::kSealed ? 1 : 0;
    filling += Filling(slot.state) ? 1 : 0;
    held += slot.readers.empty() && slot.admin_readers.empty() ? 0 : 1;
    waiting += Stuck(slot, seat) ? 1 : 0;
  }
  std::string text = absl::StrCat(
      pending.fetch ? "restore of step " : "save of step ",
      pending.fetch ? pending.fetch->checkpoint.step : pending.step, " by rank ", seat.rank,
      " needs a slot of ", FormatBytes(pending.bytes), " and there is none: this rank has ",
      CountForRank(seat), " of ", config_.memory().slots_per_rank(),
      " slots (memory.slots_per_rank; ", copies, " sealed, ", filling, " being written, ", held,
      " being read", NameSome(readers), "), ", waiting,
      " more wait for processes to end; the node holds ", FormatBytes(bytes_used_), " of ",
      FormatBytes(bytes_max_), " (memory.bytes_max)");
  if (!pending.create_problem.empty()) {
    absl::StrAppend(&text, "; making a slot failed: ", pending.create_problem);
  }
  if (pending.limit == Limit::kUser) {
    absl::StrAppend(&text, "; your jobs hold ", FormatBytes(BytesOf(seat.uid)), " of ",
                    UserBytesMaxText());
  }
  if (pending.limit != Limit::kRank) {
    absl::StrAppend(&text, HoldersHere(pending, seat));
  }
  return {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_NO_ROOM, std::move(text)};
}

}  // namespace holdfast
