#include "ckptctl/manual.h"

#include <cstdint>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace holdfast {
namespace {

// One character of well-formed UTF-8, which our own texts are.
uint32_t TakeCode(std::string_view& text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0u; };
  const size_t length = byte(0) < 0x80 ? 1 : byte(0) < 0xE0 ? 2 : byte(0) < 0xF0 ? 3 : 4;
  uint32_t code = length == 1 ? byte(0) : byte(0) & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    code = (code << 6) | (byte(i) & 0x3Fu);
  }
  text.remove_prefix(std::min(length, text.size()));
  return code;
}

// Text as roff shows it unchanged: its own signs written by name, and none of them at the begin of
// a line.
std::string Roff(std::string_view text) {
  std::string out;
  if (!text.empty() && (text[0] == '.' || text[0] == '\'')) {
    out = "\\&";
  }
  while (!text.empty()) {
    const uint32_t code = TakeCode(text);
    switch (code) {
      case '\\':
        out += "\\e";
        break;
      case '-':
        out += "\\-";
        break;
      case '\'':
        out += "\\(aq";
        break;
      case '`':
        out += "\\(ga";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      case '"':
        out += "\\(dq";
        break;
      default:
        out += code < 0x80 ? std::string(1, static_cast<char>(code))
                           : absl::StrFormat("\\[u%04X]", code);
    }
  }
  return out;
}

// A paragraph's text: each sentence and clause may be one line.
std::string TextLine(std::string_view text) {
  return Roff(text) + "\n";
}

std::string Bold(std::string_view text) {
  return absl::StrCat("\\fB", Roff(text), "\\fR");
}
std::string Italic(std::string_view text) {
  return absl::StrCat("\\fI", Roff(text), "\\fR");
}

std::string PageTitle(const CliModel& model, int section) {
  // No date: the page is the program's, which says its version.
  return absl::StrCat(".TH ", absl::AsciiStrToUpper(model.program), " ", section,
                      " \"\" \"Holdfast ", model.version, "\" \"Holdfast\"\n");
}

std::string Tag(const CliOption& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) {
    names.push_back(Bold(name));
  }
  const std::string value =
      option.value.empty()
          ? ""
          : Italic(absl::StrCat(option.value, option.many && option.names.empty() ? "..." : ""));
  return absl::StrCat(".TP\n", absl::StrJoin(names, ", "),
                      names.empty() || value.empty() ? "" : " ", value, "\n");
}

std::string AboutOption(const CliOption& option) {
  std::string text = option.about;
  if (!option.values.empty()) {
    absl::StrAppend(&text, ". One of: ", absl::StrJoin(option.values, ", "));
  }
  return TextLine(text);
}

std::string OptionsSection(const std::vector<CliOption>& options) {
  std::string out;
  for (const CliOption& option : options) {
    absl::StrAppend(&out, Tag(option), AboutOption(option));
  }
  return out;
}

// Those that every command takes, the first command's as the program's.
constexpr char kCommonGroup[] = "Options of every command";

std::vector<CliOption> Own(const CliCommand& command) {
  std::vector<CliOption> own;
  for (const CliOption& option : command.options) {
    const bool help = !option.names.empty() && option.names.back() == "--help";
    if (option.group != kCommonGroup && !help) {
      own.push_back(option);
    }
  }
  return own;
}

std::string UsageLine(const CliModel& model, const CliCommand& command) {
  std::string out = absl::StrCat(Bold(model.program), " ", Bold(command.name));
  bool options = false;
  for (const CliOption& option : Own(command)) {
    if (!option.names.empty()) {
      options = true;
      continue;
    }
    const std::string value = absl::StrCat(option.value, option.many ? "..." : "");
    absl::StrAppend(&out, " ",
                    option.required ? Italic(value) : absl::StrCat("[", Italic(value), "]"));
  }
  return absl::StrCat(".PP\n", out, options ? " [options]" : "", "\n");
}

// "Example:\n  ckptctl status llama-7b".
std::string FooterSection(std::string_view footer) {
  std::string out;
  for (const absl::string_view line : absl::StrSplit(ToAbsl(footer), '\n')) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty()) {
      continue;
    }
    if (line == text) {
      absl::StrAppend(&out, ".PP\n", TextLine(std::string(text)));
    } else {
      // As it is: an example, or one line of a table.
      absl::StrAppend(&out, ".RS 4\n.nf\n", TextLine(std::string(text)), ".fi\n.RE\n");
    }
  }
  return out;
}

std::string CommandSection(const CliModel& model, const CliCommand& command) {
  return absl::StrCat(".SS ", Roff(command.name), "\n", TextLine(command.about + "."),
                      UsageLine(model, command), OptionsSection(Own(command)),
                      FooterSection(command.footer));
}

// Of the program's footer the part below "Exit codes:".
std::string ExitCodes(const std::string& footer) {
  std::string out;
  bool below = false;
  for (const absl::string_view line : absl::StrSplit(footer, '\n')) {
    if (below) {
      const absl::string_view text = absl::StripAsciiWhitespace(line);
      const size_t space = text.find(' ');
      if (space == absl::string_view::npos) {
        break;
      }
      absl::StrAppend(&out, ".TP\n", Bold(std::string(text.substr(0, space))), "\n",
                      TextLine(std::string(absl::StripAsciiWhitespace(text.substr(space)))));
    }
    below = below || line == "Exit codes:";
  }
  return out;
}

constexpr char kCkptctlFiles[] = R"(.SH ENVIRONMENT
.TP
.B HOLDFAST_ADMIN_SOCKET
The admin socket, where no
.B \-\-socket
is told.
.TP
.B XDG_RUNTIME_DIR
Its
.I holdfast/admin.sock
is asked next, if it is there.
.SH FILES
.TP
.I /run/holdfast/admin.sock
The admin socket of the daemon of all users.
.SH SEE ALSO
.BR ckptd (8)
)";

constexpr char kCkptdEnd[] = R"(.SH SIGNALS
.TP
.BR SIGTERM ", " SIGINT
It stops cleanly.
What was sealed is kept, and found again at the next start.
.SH EXIT STATUS
.TP
.B 0
It was asked to stop and did, or
.B \-\-check\-config
found nothing wrong.
.TP
.B 1
It cannot start, or did not stop cleanly.
.TP
.B 2
A wrong argument, or a setting that is wrong.
.SH FILES
.TP
.I /etc/holdfast/ckptd.yaml
Its settings; for users
.I \(ti/.config/holdfast/ckptd.yaml
before it.
Every setting has a default.
.TP
.I /run/holdfast
Its sockets: those of the training processes and of
.BR ckptctl (1).
.TP
.I /dev/shm/holdfast
The slots.
.TP
.I /var/lib/holdfast
Its catalog, its lock, and what it knows of its cluster.
.SH SEE ALSO
.BR ckptctl (1)
)";

// "  --config FILE               settings (YAML)": names and value end where two blanks are.
CliOption ReadOption(absl::string_view line) {
  CliOption option;
  line = absl::StripAsciiWhitespace(line);
  const size_t gap = line.find("  ");
  const absl::string_view left = line.substr(0, gap);
  option.about = std::string(
      gap == absl::string_view::npos ? "" : absl::StripAsciiWhitespace(line.substr(gap)));
  const size_t space = left.find(' ');
  option.names = absl::StrSplit(left.substr(0, space), ',');
  option.value = std::string(space == absl::string_view::npos ? "" : left.substr(space + 1));
  return option;
}

}  // namespace

CliModel ReadHelp(const std::string& program, const std::string& version, std::string_view help) {
  CliModel model{.program = program, .version = version};
  for (const absl::string_view line : absl::StrSplit(ToAbsl(help), '\n')) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (line.substr(0, 3) == "  -") {
      model.options.push_back(ReadOption(line));
    } else if (!text.empty() && line[0] == ' ' && !model.options.empty()) {
      // An option's text that stands on lines of its own.
      std::string& about = model.options.back().about;
      absl::StrAppend(&about, about.empty() ? "" : " ", text);
    } else if (model.about.empty() && !text.empty()) {
      model.about = std::string(text);
    }
  }
  return model;
}

std::string CkptctlManual(const CliModel& model) {
  std::string out = absl::StrCat(PageTitle(model, 1), ".SH NAME\n", model.program,
                                 " \\- looks at, checks and cares for the "
                                 "checkpoints that Holdfast keeps\n.SH SYNOPSIS\n",
                                 Bold(model.program), " ", Italic("COMMAND"), " [",
                                 Italic("options"), "]\n.SH DESCRIPTION\n", TextLine(model.about),
                                 ".SH OPTIONS\n", OptionsSection(model.options), ".SH COMMANDS\n");
  for (const CliCommand& command : model.commands) {
    absl::StrAppend(&out, CommandSection(model, command));
  }
  return absl::StrCat(out, ".SH EXIT STATUS\n", ExitCodes(model.footer), kCkptctlFiles);
}

std::string CkptdManual(const CliModel& model) {
  return absl::StrCat(PageTitle(model, 8), ".SH NAME\n", model.program,
                      " \\- keeps the checkpoints of the training processes on this node\n"
                      ".SH SYNOPSIS\n",
                      Bold(model.program), " [", Italic("options"), "]\n.SH DESCRIPTION\n",
                      TextLine(model.about), ".SH OPTIONS\n", OptionsSection(model.options),
                      kCkptdEnd);
}

}  // namespace holdfast
