#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/open_step.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/tensor_choice.h"
#include "ckptctl/tensor_stats.h"
#include "ckptctl/tensor_views.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

const char* NameOf(DiffVerdict verdict) {
  switch (verdict) {
    case DiffVerdict::kOnlyA:
      return "only_a";
    case DiffVerdict::kOnlyB:
      return "only_b";
    case DiffVerdict::kOtherType:
      return "other_type";
    case DiffVerdict::kProblem:
      return "problem";
    case DiffVerdict::kEqual:
      return "equal";
    case DiffVerdict::kDifferent:
      return "different";
  }
  return "?";
}

// By name; a rank's own by the rank, too.
using Key = std::pair<std::string_view, std::optional<uint32_t>>;
Key KeyOf(const SavedItem& item) {
  return {item.name, item.ranks.empty() ? std::nullopt : std::optional(item.ranks.front())};
}

absl::StatusOr<std::map<Key, size_t>> Chosen(const DiffArguments& arguments,
                                             const OpenedStep& step) {
  std::map<Key, size_t> chosen;
  const absl::StatusOr<std::vector<size_t>> indices =
      ChooseTensors(step.items(), {arguments.only, arguments.tensor});
  // What one of the two has nothing of is no mistake.
  if (!indices.ok() && !absl::IsNotFound(indices.status())) {
    return indices.status();
  }
  if (indices.ok()) {
    for (const size_t i : *indices) {
      chosen.emplace(KeyOf(step.items()[i]), i);
    }
  }
  return chosen;
}

// What can be said without reading anything; kEqual: they are to be compared.
DiffRow Row(const SavedItem* a, const SavedItem* b) {
  DiffRow row{a, b, DiffVerdict::kEqual, {}};
  if (a == nullptr || b == nullptr) {
    row.verdict = a == nullptr ? DiffVerdict::kOnlyB : DiffVerdict::kOnlyA;
  } else if (!a->problem.empty() || !b->problem.empty()) {
    row.verdict = DiffVerdict::kProblem;
  } else if (a->type != b->type || a->shape != b->shape) {
    row.verdict = DiffVerdict::kOtherType;
  }
  return row;
}

class Comparison {
 public:
  Comparison(const Context& context, const DiffArguments& arguments, const OpenedStep& a,
             const OpenedStep& b)
      : context_(context), arguments_(arguments), a_(a), b_(b) {}

  absl::StatusOr<std::vector<DiffRow>> Run();

 private:
  absl::Status Pair();
  absl::Status Compare();

  const Context& context_;
  const DiffArguments& arguments_;
  const OpenedStep& a_;
  const OpenedStep& b_;
  std::vector<DiffRow> rows_;
  // Those to be compared: which row, and where in each step.
  std::vector<size_t> row_of_;
  std::vector<size_t> in_a_;
  std::vector<size_t> in_b_;
};

absl::StatusOr<std::vector<DiffRow>> Comparison::Run() {
  HF_RETURN_IF_ERROR(Pair());
  HF_RETURN_IF_ERROR(Compare());
  return std::move(rows_);
}

absl::Status Comparison::Pair() {
  HF_ASSIGN_OR_RETURN(const auto of_a, Chosen(arguments_, a_));
  HF_ASSIGN_OR_RETURN(const auto of_b, Chosen(arguments_, b_));
  if (of_a.empty() && of_b.empty()) {
    return ChooseTensors(a_.items(), {arguments_.only, arguments_.tensor}).status();
  }
  std::map<Key, std::pair<std::optional<size_t>, std::optional<size_t>>> both;
  for (const auto& [key, i] : of_a) {
    both[key].first = i;
  }
  for (const auto& [key, i] : of_b) {
    both[key].second = i;
  }
  for (const auto& [key, indices] : both) {
    const auto& [in_a, in_b] = indices;
    rows_.push_back(Row(in_a ? &a_.items()[*in_a] : nullptr, in_b ? &b_.items()[*in_b] : nullptr));
    if (rows_.back().verdict == DiffVerdict::kEqual) {
      row_of_.push_back(rows_.size() - 1);
      in_a_.push_back(*in_a);
      in_b_.push_back(*in_b);
    }
  }
  return absl::OkStatus();
}

// Side by side: as both have the same tensors, their windows are cut alike.
absl::Status Comparison::Compare() {
  std::vector<DifferenceOf> differences;
  uint64_t total = 0;
  for (const size_t i : in_a_) {
    differences.emplace_back(a_.items()[i].type);
    total += a_.items()[i].bytes;
  }
  TensorBytes tensors(a_.items(), in_a_);
  HF_ASSIGN_OR_RETURN(WindowReader of_a, a_.Read(tensors.Ranges()));
  HF_ASSIGN_OR_RETURN(WindowReader of_b, b_.Read(TensorBytes(b_.items(), in_b_).Ranges()));
  ProgressLine line(context_, Duration(0));
  const MonotonicTime begin = context_.clock->Now();
  uint64_t done = 0;
  while (true) {
    HF_ASSIGN_OR_RETURN(const std::span<const std::byte> a, of_a.Next());
    HF_ASSIGN_OR_RETURN(const std::span<const std::byte> b, of_b.Next());
    if (a.size() != b.size()) {
      return absl::InternalError("two steps' windows were not cut alike");
    }
    if (a.empty()) {
      break;
    }
    tensors.Give(a, [&](size_t n, std::span<const std::byte> some) {
      differences[n].Add(some, b.subspan(static_cast<size_t>(some.data() - a.data()), some.size()));
    });
    done += a.size();
    line.Draw([&] {
      return absl::StrCat(
          "diff ", EscapeText(arguments_.a.job), " ",
          ByteProgress(done, total,
                       (context_.clock->Now() - begin) / std::chrono::milliseconds(1)));
    });
  }
  for (size_t n = 0; n < differences.size(); ++n) {
    DiffRow& row = rows_[row_of_[n]];
    row.difference = differences[n].Finish();
    row.verdict = row.difference.differing == 0 ? DiffVerdict::kEqual : DiffVerdict::kDifferent;
  }
  return absl::OkStatus();
}

std::string TypeText(const SavedItem& item) {
  return absl::StrCat(TypeName(item.type), " ", ShapeText(item.shape));
}

nlohmann::ordered_json ToJson(const std::optional<double>& number) {
  return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json ToJson(const SavedItem* item) {
  if (item == nullptr) {
    return nullptr;
  }
  return {{"dtype", TypeName(item->type)}, {"shape", item->shape}, {"problem", item->problem}};
}

nlohmann::ordered_json RowToJson(const DiffRow& row) {
  const SavedItem& item = row.a != nullptr ? *row.a : *row.b;
  nlohmann::ordered_json json;
  json["name"] = item.name;
  json["rank"] = item.ranks.empty() ? nlohmann::ordered_json(nullptr)
                                    : nlohmann::ordered_json(item.ranks.front());
  json["verdict"] = NameOf(row.verdict);
  json["a"] = ToJson(row.a);
  json["b"] = ToJson(row.b);
  if (row.verdict == DiffVerdict::kEqual || row.verdict == DiffVerdict::kDifferent) {
    json["elements"] = item.elements;
    json["elements_differing"] = row.difference.differing;
    json["max_abs_difference"] = ToJson(row.difference.max_abs);
    json["relative_norm"] = ToJson(row.difference.relative_norm);
    json["nan_a"] = row.difference.nan_a;
    json["nan_b"] = row.difference.nan_b;
    json["inf_a"] = row.difference.inf_a;
    json["inf_b"] = row.difference.inf_b;
  }
  return json;
}

}  // namespace

std::string RenderDiff(std::string_view a, std::string_view b, const std::vector<DiffRow>& rows) {
  Table table({{"MAX |A-B|", Align::kRight},
               {"||A-B||/||A||", Align::kRight},
               {"DIFFERENT", Align::kRight},
               {"NAN", Align::kRight},
               {"INF", Align::kRight},
               {"DTYPE, SHAPE", Align::kLeft},
               {"TENSOR", Align::kLeft}});
  std::string others;
  size_t equal = 0;
  size_t shown = 0;
  for (const DiffRow& row : rows) {
    equal += row.verdict == DiffVerdict::kEqual ? 1 : 0;
    if (row.verdict == DiffVerdict::kEqual || shown++ >= kCopiesShown) {
      continue;
    }
    const SavedItem& item = row.a != nullptr ? *row.a : *row.b;
    const TensorDifference& is = row.difference;
    switch (row.verdict) {
      case DiffVerdict::kOnlyA:
      case DiffVerdict::kOnlyB:
        absl::StrAppend(&others, "only in ", row.b == nullptr ? "A" : "B", ": ", ShownName(item),
                        ", ", TypeText(item), "\n");
        break;
      case DiffVerdict::kOtherType:
        absl::StrAppend(&others, ShownName(item), " is ", TypeText(*row.a), " in A and ",
                        TypeText(*row.b), " in B\n");
        break;
      case DiffVerdict::kProblem:
        absl::StrAppend(&others, "PROBLEM: ",
                        EscapeText(row.a->problem.empty() ? row.b->problem : row.a->problem), "\n");
        break;
      default:
        table.AddRow({NumberText(is.max_abs), NumberText(is.relative_norm),
                      absl::StrCat(is.differing, " of ", is.elements),
                      absl::StrCat(is.nan_a, ", ", is.nan_b),
                      absl::StrCat(is.inf_a, ", ", is.inf_b), TypeText(item), ShownName(item)});
    }
  }
  std::string out = absl::StrCat(
      "A: ", std::string(a), "\nB: ", std::string(b), "\n",
      equal == rows.size() ? "all" : absl::StrCat(equal, " of"), " ",
      Count(rows.size(), "tensor", "tensors"), equal == 1 && rows.size() == 1 ? " is" : " are",
      " the same, bit for bit\n", table.empty() ? "" : table.Render("  "), others);
  if (shown > kCopiesShown) {
    absl::StrAppend(&out, "… and ", shown - kCopiesShown,
                    " more that differ; --tensor chooses, --json has all\n");
  }
  return out;
}

ExitCode RunDiff(const Context& context, const DiffArguments& arguments) {
  const absl::StatusOr<OpenedStep> a = OpenStep(context, arguments.a);
  if (!a.ok()) {
    return ReportError(context, a.status());
  }
  const absl::StatusOr<OpenedStep> b = OpenStep(context, arguments.b);
  if (!b.ok()) {
    return ReportError(context, b.status());
  }
  const absl::StatusOr<std::vector<DiffRow>> rows = Comparison(context, arguments, *a, *b).Run();
  if (!rows.ok()) {
    return ReportError(context, rows.status());
  }
  const std::string& job = arguments.a.job;
  if (!context.json) {
    *context.out << RenderDiff(EscapeText(NameOfStep(a->reader(), job)),
                               EscapeText(NameOfStep(b->reader(), job)), *rows);
    return ExitCode::kOk;
  }
  nlohmann::ordered_json json;
  json["job"] = job;
  for (const auto& [name, step] : {std::pair("a", &*a), std::pair("b", &*b)}) {
    json[name] = {{"step", step->reader().step()}, {"attempt", step->reader().attempt()}};
  }
  const auto equal = std::count_if(rows->begin(), rows->end(), [](const DiffRow& row) {
    return row.verdict == DiffVerdict::kEqual;
  });
  json["equal"] = equal;
  json["not_equal"] = static_cast<int64_t>(rows->size()) - equal;
  json["tensors"] = nlohmann::ordered_json::array();
  for (const DiffRow& row : *rows) {
    json["tensors"].push_back(RowToJson(row));
  }
  *context.out << DumpJson(json) << "\n";
  return ExitCode::kOk;
}

}  // namespace holdfast
