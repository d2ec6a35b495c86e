// The name under which this process may come to hold a copy for reading: given with the request
// (wire::EnterSession, ReportLoad, Attach), so that the hold can be let go also when a lost
// connection leaves it open whether there is one.
//
//   ReadTicket ticket(socket);
//   enter.hold = ticket.id();
//   …                                   // the answer brought a source: read it
//   connection.Call<wire::Done>(wire::ReleaseRead{ticket.id()}, deadline)  → ticket.Settle();
//
// A ticket that goes without having been settled is released over the next connection of this
// process to the same daemon (Connection::Dial). Thread-safe but for the
// single ticket. In a forked child nothing is released: the holds are the parent's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client-lib/src/fork_guard.h"

namespace holdfast::client {

class ReadTicket {
 public:
  explicit ReadTicket(std::string socket);
  ~ReadTicket();
  ReadTicket(const ReadTicket&) = delete;
  ReadTicket& operator=(const ReadTicket&) = delete;

  uint64_t id() const { return id_; }
  // There is no hold of that name (any more), and none can come.
  void Settle();

 private:
  const ForkOwner owner_;
  const uint64_t id_;
};

// Names of tickets for that daemon that went unsettled.
std::vector<uint64_t> AbandonedTickets(const std::string& socket);
void SettleAbandoned(uint64_t id);

}  // namespace holdfast::client
