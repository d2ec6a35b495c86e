#include "server/runtime/http2_farewell.h"

namespace holdfast {
namespace {

// RFC 9113.
constexpr char kSettingsFrame[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
constexpr char kGoawayType = 7;
constexpr char kEnhanceYourCalm = 0xb;
constexpr size_t kGoawayFieldBytes = 8;  // before the text: the last stream, and the error

}  // namespace

std::string Http2Farewell(std::string_view why) {
  const std::string text(why.substr(0, kFarewellTextMax));
  const size_t size = kGoawayFieldBytes + text.size();
  std::string frames(kSettingsFrame, sizeof(kSettingsFrame));
  frames += {0, static_cast<char>(size >> 8), static_cast<char>(size & 0xff), kGoawayType, 0};
  frames += {0, 0, 0, 0};  // of the connection
  frames += {0, 0, 0, 0};  // no stream was taken
  frames += {0, 0, 0, kEnhanceYourCalm};
  return frames + text;
}

}  // namespace holdfast
