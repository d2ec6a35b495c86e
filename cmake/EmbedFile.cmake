# A file as a function of a program: cmake -D IN=… -D OUT=….cc -D HEADER=…h -D FUNCTION=… -P EmbedFile.cmake
file(READ ${IN} bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${OUT} "#include \"${HEADER}\"

namespace holdfast {
namespace {
constexpr unsigned char kBytes[] = {
${bytes}};
}  // namespace

std::string_view ${FUNCTION}() {
  return {reinterpret_cast<const char*>(kBytes), sizeof(kBytes)};
}

}  // namespace holdfast
")
