// A std::variant of many alternatives whose copying, moving and destruction are compiled once. Each
// is a table of one function per alternative, and every source that passes such a value on would
// compile them all.
//
//   using AnyEvent = std::variant<Started, ConnectionOpened, …>;
//   extern template class OneOf<AnyEvent>;  // in the source: template class OneOf<AnyEvent>;
//   struct Event : OneOf<AnyEvent> {        // a name of its own: the long one would stand in every
//   symbol
//     using OneOf::OneOf;
//   };
#pragma once

#include <type_traits>
#include <utility>
#include <variant>

namespace holdfast {

template <typename T, typename Variant>
inline constexpr bool kIsAlternative = false;
template <typename T, typename... Types>
inline constexpr bool kIsAlternative<T, std::variant<Types...>> = (std::is_same_v<T, Types> || ...);

template <typename Variant>
class OneOf : public Variant {
 public:
  OneOf();
  OneOf(const OneOf& other);
  OneOf(OneOf&& other) noexcept;
  OneOf& operator=(const OneOf& other);
  OneOf& operator=(OneOf&& other) noexcept;
  ~OneOf();

  template <typename T>
  requires kIsAlternative<std::remove_cvref_t<T>, Variant> OneOf(
      T&& value)  // not explicit: it is as good as its value
      : Variant(std::in_place_type<std::remove_cvref_t<T>>, std::forward<T>(value)) {}
};

template <typename Variant>
OneOf<Variant>::OneOf() = default;
template <typename Variant>
OneOf<Variant>::OneOf(const OneOf& other) = default;
template <typename Variant>
OneOf<Variant>::OneOf(OneOf&& other) noexcept = default;
template <typename Variant>
OneOf<Variant>& OneOf<Variant>::operator=(const OneOf& other) = default;
template <typename Variant>
OneOf<Variant>& OneOf<Variant>::operator=(OneOf&& other) noexcept = default;
template <typename Variant>
OneOf<Variant>::~OneOf() = default;

}  // namespace holdfast
