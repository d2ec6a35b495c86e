// Which request a message is about, if it is about one.
#pragma once

#include <variant>

#include "server/messages.h"

namespace holdfast {

template <typename M>
concept HasToken = requires(M m) {
  m.token;
};

// 0: none.
template <typename Variant>
RequestToken TokenOf(const Variant& message) {
  return std::visit(
      [](const auto& m) -> RequestToken {
        if constexpr (HasToken<decltype(m)>) {
          return m.token;
        } else {
          return 0;
        }
      },
      message);
}

// To replace it; nullptr: none.
template <typename Variant>
RequestToken* TokenIn(Variant& message) {
  return std::visit(
      [](auto& m) -> RequestToken* {
        if constexpr (HasToken<decltype(m)>) {
          return m.token != 0 ? &m.token : nullptr;
        } else {
          return nullptr;
        }
      },
      message);
}

}  // namespace holdfast
