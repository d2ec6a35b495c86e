#include "ckptctl/completion.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kAboutMax = 72;  // of a line beside a candidate

// What may stand for a value.
enum class Kind { kAnything, kValues, kFile, kJob, kNode };

Kind KindOf(const CliOption& option) {
  if (!option.values.empty()) {
    return Kind::kValues;
  }
  if (option.value == "PATH" || option.value == "FILE" || option.value == "DIRECTORY" ||
      option.value == "REMOTE_DIR") {
    return Kind::kFile;
  }
  // The words of `set` begin with a job, too.
  if (option.value == "JOB" || option.value == "WORDS") {
    return Kind::kJob;
  }
  return option.value == "NODE" ? Kind::kNode : Kind::kAnything;
}

std::string Short(const std::string& about) {
  if (about.size() <= kAboutMax) {
    return about;
  }
  // Up to a word's end; what is cut there is ASCII, or its first byte is kept out.
  const size_t space = about.rfind(' ', kAboutMax);
  return absl::StrCat(about.substr(0, space == std::string::npos ? 0 : space), " ...");
}

std::string Quoted(std::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(ToAbsl(text), {{"'", "'\\''"}}), "'");
}

std::vector<std::string> NamesOf(const std::vector<CliOption>& options, bool with_value) {
  std::vector<std::string> names;
  for (const CliOption& option : options) {
    if (!with_value || !option.value.empty()) {
      names.insert(names.end(), option.names.begin(), option.names.end());
    }
  }
  return names;
}

// Options that a word belongs to which is no word of its own.
std::vector<std::string> ValuedNames(const CliModel& model) {
  std::vector<std::string> valued = NamesOf(model.options, true);
  for (const CliCommand& command : model.commands) {
    for (const std::string& name : NamesOf(command.options, true)) {
      if (std::find(valued.begin(), valued.end(), name) == valued.end()) {
        valued.push_back(name);
      }
    }
  }
  return valued;
}

// ---- bash ----

std::string BashAction(const CliOption& option) {
  switch (KindOf(option)) {
    case Kind::kValues:
      return absl::StrCat("_ckptctl_words ", Quoted(absl::StrJoin(option.values, " ")));
    case Kind::kFile:
      return "_ckptctl_files";
    case Kind::kJob:
      return "_ckptctl_names jobs";
    case Kind::kNode:
      return "_ckptctl_names nodes";
    case Kind::kAnything:
      return ":";
  }
  return ":";
}

std::string BashCommand(const std::string& name, const std::vector<CliOption>& options,
                        const std::vector<std::string>& words) {
  std::string out = absl::StrCat("    ", name.empty() ? "''" : name, ")\n");
  std::string cases;
  size_t place = 0;
  std::string places;
  for (const CliOption& option : options) {
    if (option.names.empty()) {
      absl::StrAppend(&places, "        ", option.many ? "*" : absl::StrCat(place), ") ",
                      BashAction(option), " ;;\n");
      ++place;
    } else if (!option.value.empty()) {
      absl::StrAppend(&cases, "        ", absl::StrJoin(option.names, "|"), ") ",
                      BashAction(option), "; return ;;\n");
    }
  }
  if (!cases.empty()) {
    absl::StrAppend(&out, "      case \"$before\" in\n", cases, "      esac\n");
  }
  std::vector<std::string> all = NamesOf(options, false);
  absl::StrAppend(&out, "      case \"$word\" in\n        -*) _ckptctl_words ",
                  Quoted(absl::StrJoin(all, " ")), "; return ;;\n      esac\n");
  if (!words.empty()) {
    absl::StrAppend(&out, "      _ckptctl_words ", Quoted(absl::StrJoin(words, " ")), "\n");
  }
  if (!places.empty()) {
    absl::StrAppend(&out, "      case \"$place\" in\n", places, "      esac\n");
  }
  return absl::StrCat(out, "      ;;\n");
}

// A word "--tier=nv" comes in three: bash splits at the characters of COMP_WORDBREAKS.
constexpr char kBashBegin[] =
    R"sh(# Completion of ckptctl for bash, made by: ckptctl completion bash
_ckptctl_words() {
  COMPREPLY=($(compgen -W "$1" -- "$word"))
}
_ckptctl_files() {
  local IFS=$'\n'
  compopt -o filenames 2>/dev/null
  COMPREPLY=($(compgen -f -- "$word"))
}
_ckptctl_names() {
  local names
  names=$("$program" "${at[@]}" complete-names "$1" 2>/dev/null) || names=
  COMPREPLY=($(compgen -W "$names" -- "$word"))
}
_ckptctl() {
  local program=$1 word=${COMP_WORDS[COMP_CWORD]} before= command= option= value= place=0 i=1
  local -a at=()  # where the line says that the daemon is
  COMPREPLY=()
  if [[ $word == = ]]; then
    word=
    before=${COMP_WORDS[COMP_CWORD-1]}
  elif ((COMP_CWORD > 0)); then
    before=${COMP_WORDS[COMP_CWORD-1]}
    if [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
  fi
  while ((i < COMP_CWORD)); do
    case "${COMP_WORDS[i]}" in
)sh";
constexpr char kBashMiddle[] = R"sh(
        option=${COMP_WORDS[i]}
        if [[ ${COMP_WORDS[i+1]-} == = ]]; then ((i += 1)); fi
        value=${COMP_WORDS[i+1]-}
        while [[ ${COMP_WORDS[i+2]-} == :* ]] && ((i + 3 < COMP_CWORD)); do  # and so does HOST:PORT
          value+=${COMP_WORDS[i+2]}${COMP_WORDS[i+3]}
          ((i += 2))
        done
        case $option in
          --socket|--address|--tls) at+=("$option" "$value") ;;
        esac
        ((i += 1)) ;;
      -*) ;;
      *)
        if [[ -z $command ]]; then command=${COMP_WORDS[i]}; else ((place += 1)); fi ;;
    esac
    ((i += 1))
  done
  case "$command" in
)sh";

std::string Bash(const CliModel& model) {
  std::vector<std::string> commands;
  for (const CliCommand& command : model.commands) {
    commands.push_back(command.name);
  }
  std::string out =
      absl::StrCat(kBashBegin, "      ", absl::StrJoin(ValuedNames(model), "|"), ")", kBashMiddle);
  absl::StrAppend(&out, BashCommand("", model.options, commands));
  for (const CliCommand& command : model.commands) {
    absl::StrAppend(&out, BashCommand(command.name, command.options, {}));
  }
  return absl::StrCat(out, "  esac\n}\ncomplete -F _ckptctl ckptctl\n");
}

// ---- zsh ----

// Within the brackets and after the colons of an argument's description.
std::string ZshText(const std::string& text) {
  return absl::StrReplaceAll(
      text, {{"\\", "\\\\"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}, {"'", "'\\''"}});
}

std::string ZshAction(const CliOption& option) {
  switch (KindOf(option)) {
    case Kind::kValues:
      return absl::StrCat("(", absl::StrJoin(option.values, " "), ")");
    case Kind::kFile:
      return "_files";
    case Kind::kJob:
      return "_ckptctl_jobs";
    case Kind::kNode:
      return "_ckptctl_nodes";
    case Kind::kAnything:
      return " ";
  }
  return " ";
}

std::string ZshOption(const CliOption& option) {
  std::string out;
  const std::string value =
      option.value.empty() ? "" : absl::StrCat(":", ZshText(option.value), ":", ZshAction(option));
  if (option.names.empty()) {
    return absl::StrCat("        '",
                        option.many       ? "*"
                        : option.required ? ""
                                          : ":",
                        value, "' \\\n");
  }
  for (const std::string& name : option.names) {
    absl::StrAppend(&out, "        '", option.many ? "*" : "", name,
                    option.value.empty() ? ""
                    : name.size() > 2    ? "="
                                         : "+",
                    "[", ZshText(Short(option.about)), "]", value, "' \\\n");
  }
  return out;
}

std::string ZshArguments(const std::vector<CliOption>& options) {
  std::string out = "      _arguments -s -S \\\n";
  for (const CliOption& option : options) {
    absl::StrAppend(&out, ZshOption(option));
  }
  return absl::StrCat(out, "        && return 0\n");
}

constexpr char kZshBegin[] = R"sh(#compdef ckptctl
# Completion of ckptctl for zsh, made by: ckptctl completion zsh
_ckptctl_names() {
  local -a names
  names=(${(f)"$(ckptctl $at complete-names $1 2>/dev/null)"})
  (( $#names )) && compadd -a names
}
_ckptctl_jobs() { _ckptctl_names jobs }
_ckptctl_nodes() { _ckptctl_names nodes }
_ckptctl_commands() {
  local -a commands=(
)sh";
constexpr char kZshMiddle[] = R"sh(  )
  _describe command commands
}
_ckptctl() {
  local context state state_descr line
  local -a at  # where the line says that the daemon is
  local i
  for (( i = 2; i < CURRENT; ++i )); do
    case $words[i] in
      --socket|--address|--tls) at+=($words[i] ${(Q)words[i+1]}) ;;
      --socket=*|--address=*|--tls=*) at+=(${(Q)words[i]}) ;;
    esac
  done
  typeset -A opt_args
  _arguments -C -S -A '-*' \
)sh";

std::string Zsh(const CliModel& model) {
  std::string out = kZshBegin;
  for (const CliCommand& command : model.commands) {
    absl::StrAppend(&out, "    '", command.name, ":", ZshText(Short(command.about)), "'\n");
  }
  absl::StrAppend(&out, kZshMiddle);
  for (const CliOption& option : model.options) {
    absl::StrAppend(&out, ZshOption(option));
  }
  absl::StrAppend(&out,
                  "        '1:command:_ckptctl_commands' \\\n        '*::argument:->argument'\n"
                  "  [[ $state == argument ]] || return\n  case $line[1] in\n");
  for (const CliCommand& command : model.commands) {
    absl::StrAppend(&out, "    ", command.name, ")\n", ZshArguments(command.options), "      ;;\n");
  }
  return absl::StrCat(out,
                      "  esac\n}\nif [[ $funcstack[1] == _ckptctl ]]; then _ckptctl \"$@\"; else "
                      "compdef _ckptctl ckptctl; fi\n");
}

// ---- fish ----

std::string FishAction(const CliOption& option) {
  switch (KindOf(option)) {
    case Kind::kValues:
      return absl::StrCat("-xa ", Quoted(absl::StrJoin(option.values, " ")));
    case Kind::kFile:
      return "-rF";
    case Kind::kJob:
      return "-xa '(__ckptctl_names jobs)'";
    case Kind::kNode:
      return "-xa '(__ckptctl_names nodes)'";
    case Kind::kAnything:
      return "-x";
  }
  return "-x";
}

void FishOptions(const std::vector<CliOption>& options, const std::string& when, std::string& out) {
  size_t place = 0;
  for (const CliOption& option : options) {
    if (option.names.empty()) {
      if (KindOf(option) != Kind::kAnything) {
        absl::StrAppend(
            &out, "complete -c ckptctl -n ",
            Quoted(absl::StrCat(when,
                                option.many ? "" : absl::StrCat("; and __ckptctl_place ", place))),
            " ", FishAction(option), "\n");
      }
      ++place;
      continue;
    }
    absl::StrAppend(&out, "complete -c ckptctl -n ", Quoted(when));
    for (const std::string& name : option.names) {
      absl::StrAppend(&out, name.size() > 2 ? " -l " : " -s ",
                      absl::StripPrefix(name, name.size() > 2 ? "--" : "-"));
    }
    absl::StrAppend(&out, option.value.empty() ? "" : absl::StrCat(" ", FishAction(option)), " -d ",
                    Quoted(Short(option.about)), "\n");
  }
}

constexpr char kFishBegin[] =
    R"sh(# Completion of ckptctl for fish, made by: ckptctl completion fish
function __ckptctl_words
    # The words before the cursor that are no options, nor their values; the first is the command.
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word $__ckptctl_valued
            set skip 1
        else if not string match -q -- '-*' $word
            echo $word
        end
    end
end
function __ckptctl_command
    set -l words (__ckptctl_words)
    test (count $words) -gt 0; and test $words[1] = $argv[1]
end
function __ckptctl_none
    test (count (__ckptctl_words)) = 0
end
function __ckptctl_place
    test (count (__ckptctl_words)) = (math $argv[1] + 1)
end
function __ckptctl_names
    set -l words (commandline -opc)
    set -l at
    for i in (seq 2 (count $words))
        if contains -- $words[$i] --socket --address --tls; and test $i -lt (count $words)
            set -a at $words[$i] $words[(math $i + 1)]
        else if string match -qr -- '^--(socket|address|tls)=' $words[$i]
            set -a at $words[$i]
        end
    end
    $words[1] $at complete-names $argv[1] 2>/dev/null
end
complete -c ckptctl -f
)sh";

std::string Fish(const CliModel& model) {
  std::string out = absl::StrCat(kFishBegin, "set -g __ckptctl_valued ",
                                 absl::StrJoin(ValuedNames(model), " "), "\n");
  FishOptions(model.options, "__ckptctl_none", out);
  for (const CliCommand& command : model.commands) {
    absl::StrAppend(&out, "complete -c ckptctl -n __ckptctl_none -a ", command.name, " -d ",
                    Quoted(Short(command.about)), "\n");
    FishOptions(command.options, absl::StrCat("__ckptctl_command ", command.name), out);
  }
  return out;
}

}  // namespace

std::string CompletionScript(const CliModel& model, std::string_view shell) {
  return shell == "bash"   ? Bash(model)
         : shell == "zsh"  ? Zsh(model)
         : shell == "fish" ? Fish(model)
                           : "";
}

}  // namespace holdfast
