// Memory of other nodes' daemons, read over libfabric by one-sided reads: this node's devices, what
// they are, and which memory of ours others may read. tiers/peer/pull.h reads theirs.
//
//   HF_ASSIGN_OR_RETURN(auto fabric, Fabric::Open({.bind_address = "10.0.0.7"}));
//   HF_ASSIGN_OR_RETURN(auto slot, fabric->Register(mapping, MemoryAccess::kReadByPeers));
//   … tell the peer fabric->address() and slot->regions(), by other means …
//   slot.reset();                                   // before the memory is unmapped
//
// A Fabric listens on each device for peers that want to read, with a thread that accepts them and,
// where the provider leaves that to the program (tcp), answers them; it sleeps when there is
// nothing to do. What is read from others goes over connections of its own, made for the one who
// reads and driven by its thread: so that closing one, the only way to call a read back, ends
// nobody else's.
//
// Thread-safe. Whoever pulls ends before the Fabric does; registrations may outlive it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "tiers/peer/registration.h"

namespace holdfast {

class FabricDevice;
class FabricServer;
class ReaderPool;
struct FabricLibrary;

inline constexpr size_t kFabricDevicesMax = 8;
inline constexpr size_t kFabricAddressBytesMax = 4096;

struct FabricOptions {
  // libfabric's name of it, "verbs" or "tcp", or "auto": verbs where there is a device for it that
  // can be opened, else tcp. Connections are our own: what follows a semicolon ("verbs;ofi_rxm") is
  // not looked at.
  std::string provider = "auto";
  // The provider's names of domains ("mlx5_0", of tcp the interfaces: "eth0"), or local addresses
  // ("10.0.0.7"). Empty: of verbs all; of tcp the one that has bind_address, without that the
  // first interface that is not the loopback.
  std::vector<std::string> devices;
  // A local address, without port.
  std::string bind_address;
  // DSCP of what is sent, 0 to 63; 0: as the system has it. FabricInfo says whether the provider
  // takes it.
  uint8_t traffic_class = 0;
  // One that was opened so long ago is closed, whoever reads over it goes on over a new one: so
  // what readers leave behind that went without a word (power, a cable) does not stay for ever.
  Duration connection_age_max = std::chrono::hours(1);
  // How the nodes that this one reads from know its connections: as what their LetGoOf is told.
  // 0: they do not.
  uint64_t reader_id = 0;
  // Connections open for reading at a time, over all devices: of tcp a pull takes up to four.
  size_t readers_max = 256;
  // A registration is split at this size, and smaller where the device refuses so much at once.
  uint64_t registration_bytes_max = uint64_t{1} << 36;
  std::string library = "libfabric.so.1";
  // Told once when something is found to lead nowhere, for people; any thread. Null: nobody is.
  std::function<void(const std::string&)> on_problem = nullptr;
};

// As the provider says after all was opened.
struct FabricDeviceInfo {
  std::string name;          // "mlx5_0", "eth0"
  std::string address;       // for people
  uint64_t mr_mode = 0;      // FI_MR_… bits
  uint64_t key_bytes = 0;    // of a registration's key
  bool random_keys = false;  // chosen by us at random, not by the provider
  uint64_t message_bytes_max = 0;
  size_t reads_max = 0;       // outstanding, of one connection
  uint8_t traffic_class = 0;  // in force; 0: none, or the provider takes none
  int numa_node = -1;         // -1: not known
  bool sleeps = false;        // its thread is woken by events, else it looks every few milliseconds
};

// The names of FI_MR_… bits: "LOCAL", "VIRT_ADDR". One that this code does not know is a number.
std::vector<std::string> NamesOfMrMode(uint64_t mr_mode);

struct FabricInfo {
  std::string provider;
  uint32_t library_version = 0;  // FI_MAJOR, FI_MINOR
  std::vector<FabricDeviceInfo> devices;
  std::vector<std::string> problems;  // devices, or a provider, that could not be opened, and why
};

// "provider=tcp;ofi_rxm device=eth0 address=…": a line for the log.
std::string ToString(const FabricInfo& info);

class Fabric {
 public:
  // NotFound: no libfabric, no such provider or device (the message lists what there is). Where
  // some device can be opened it goes without the others; info().problems names them.
  static absl::StatusOr<std::unique_ptr<Fabric>> Open(const FabricOptions& options);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const FabricInfo& info() const { return info_; }
  // What a peer needs to find this node: opaque bytes, at most kFabricAddressBytesMax.
  const std::string& address() const { return address_; }
  // OK when `address` is one of a node that this one can read from; else InvalidArgument, or
  // FailedPrecondition when it is of another provider.
  absl::Status CheckAddress(std::string_view address) const;

  // What is wrong with devices and peers at the moment, for people.
  std::vector<std::string> Problems() const;

  // `memory` stays mapped, and where it is, until the registration is gone; populate it first. A
  // file underneath that is cut short harms nobody but those who read it. ResourceExhausted when
  // the system does not let so much memory be pinned: the message says what to raise.
  absl::StatusOr<std::shared_ptr<Registration>> Register(std::span<std::byte> memory,
                                                         MemoryAccess access);

  // A node that read from here is gone: its connections are closed, soon, and of ours those that
  // nobody reads over at the moment, since some may lead there. (Who went without a word ends
  // none.) May take milliseconds.
  void LetGoOf(uint64_t reader_id);

  // For tiers/peer/ itself.
  const std::vector<std::shared_ptr<FabricDevice>>& devices() const { return devices_; }
  ReaderPool& readers() const { return *readers_; }
  const std::string& provider() const { return info_.provider; }

 private:
  Fabric();
  absl::Status OpenProvider(const FabricLibrary& library, const std::string& provider);

  FabricOptions options_;
  FabricInfo info_;
  std::string address_;
  std::vector<std::shared_ptr<FabricDevice>> devices_;
  std::vector<std::unique_ptr<FabricServer>> servers_;
  std::unique_ptr<ReaderPool> readers_;
};

}  // namespace holdfast
