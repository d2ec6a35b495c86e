#include "bench/raw_read.h"

#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench/durable.h"
#include "tiers/peer/fabric_address.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast::bench {
namespace {

constexpr size_t kQueue = 64;

[[noreturn]] void GiveUp(const char* what, int64_t result) {
  std::fprintf(stderr, "holdfast_bench: raw reads: %s: %lld\n", what,
               static_cast<long long>(result));
  std::exit(1);
}

}  // namespace

struct RawReader::Connection {
  FabricQueues queues;
  FabricObject<fid_ep> endpoint;

  void Wait() const {
    if (queues.MaySleep()) {
      auto waits = queues.Waits();
      ::poll(waits.data(), waits.size(), 20);
    }
  }
};

RawReader::RawReader(Fabric& fabric, const PullSource& source)
    : source_(source), connection_(new Connection) {
  FabricDevice& device = *fabric.devices().front();
  const FabricAddress peer = MustBeOk(DecodeFabricAddress(source.address), "decode the address");
  connection_->queues = MustBeOk(device.OpenQueues(kQueue), "open queues");
  connection_->endpoint =
      MustBeOk(device.OpenEndpoint(&device.info(), connection_->queues), "open an endpoint");
  if (const int result =
          ::fi_connect(connection_->endpoint.get(), peer.endpoints.front().address.data(),
                       peer.token.data(), peer.token.size());
      result != 0) {
    GiveUp("connect", result);
  }
  while (true) {
    const auto event = connection_->queues.NextEvent();
    if (event.has_value() && event->kind == FabricEvent::Kind::kConnected) {
      return;
    }
    if (event.has_value() && event->kind == FabricEvent::Kind::kEnded) {
      GiveUp("connect", event->error);
    }
    connection_->Wait();
  }
}

RawReader::~RawReader() {
  delete connection_;
}

void RawReader::Read(std::span<std::byte> into, size_t piece_bytes, size_t window) {
  const RemoteRegion& from = source_.regions.front();
  std::vector<fi_context2> contexts(window);
  std::vector<fi_context2*> free;
  for (fi_context2& context : contexts) {
    free.push_back(&context);
  }
  const size_t pieces = (into.size() + piece_bytes - 1) / piece_bytes;
  size_t posted = 0;
  for (size_t done = 0; done < pieces;) {
    while (!free.empty() && posted < pieces) {
      const size_t at = posted * piece_bytes;
      const size_t bytes = std::min(piece_bytes, into.size() - at);
      const ssize_t result = ::fi_read(connection_->endpoint.get(), into.data() + at, bytes,
                                       nullptr, 0, from.base + at, from.key, free.back());
      if (result == -FI_EAGAIN) {
        break;
      }
      if (result != 0) {
        GiveUp("fi_read", result);
      }
      free.pop_back();
      ++posted;
    }
    fi_cq_entry entry{};
    const ssize_t result = ::fi_cq_read(connection_->queues.completions.get(), &entry, 1);
    if (result == 1) {
      free.push_back(static_cast<fi_context2*>(entry.op_context));
      ++done;
    } else if (result != -FI_EAGAIN) {
      GiveUp("fi_cq_read", result);
    } else {
      connection_->Wait();
    }
  }
}

}  // namespace holdfast::bench
