// Lets a fabric's devices refuse to register memory, as they do where the process may not pin so
// much.
//
//   RefusedRegistrations refused(*fabric, 2);   // from the third one on, of each device
//
// Until the object is gone. One at a time in a process, and the fabric outlives it.
#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_errno.h>

#include <atomic>
#include <functional>
#include <map>

#include "tiers/peer/fabric.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {

class RefusedRegistrations {
 public:
  // `meanwhile` is called in the middle of each.
  RefusedRegistrations(Fabric& fabric, int allowed, std::function<void()> meanwhile = nullptr) {
    for (const auto& device : fabric.devices()) {
      Device& its = Devices()[&device->domain()->fid];
      its.domain = device->domain();
      its.real = its.domain->mr;
      its.refusing = *its.real;
      its.refusing.reg = &Reg;
      its.allowed = allowed;
      its.meanwhile = meanwhile;
      its.domain->mr = &its.refusing;
    }
  }
  ~RefusedRegistrations() {
    for (auto& [fid, its] : Devices()) {
      its.domain->mr = its.real;
    }
    Devices().clear();
  }
  RefusedRegistrations(const RefusedRegistrations&) = delete;
  RefusedRegistrations& operator=(const RefusedRegistrations&) = delete;

 private:
  struct Device {
    fid_domain* domain = nullptr;
    fi_ops_mr* real = nullptr;
    fi_ops_mr refusing{};
    std::atomic<int> allowed{0};
    std::function<void()> meanwhile;
  };
  static std::map<const fid*, Device>& Devices() {
    static std::map<const fid*, Device> devices;
    return devices;
  }
  static int Reg(fid* domain, const void* memory, size_t bytes, uint64_t access, uint64_t offset,
                 uint64_t key, uint64_t flags, fid_mr** made, void* context) {
    Device& its = Devices().at(domain);
    if (its.meanwhile) {
      its.meanwhile();
    }
    return its.allowed-- > 0
               ? its.real->reg(domain, memory, bytes, access, offset, key, flags, made, context)
               : -FI_ENOMEM;
  }
};

}  // namespace holdfast
