// plan-capacity: a calculator, which asks no daemon.
#include <ostream>

#include "ckptctl/capacity.h"
#include "ckptctl/capacity_arguments.h"
#include "ckptctl/commands.h"

namespace holdfast {

ExitCode RunPlanCapacity(const Context& context, const CapacityArguments& arguments) {
  const absl::StatusOr<CapacityInput> input = CompleteCapacity(arguments);
  const absl::StatusOr<CapacityPlan> plan =
      input.ok() ? PlanCapacity(*input) : absl::StatusOr<CapacityPlan>(input.status());
  if (!plan.ok()) {
    return ReportUsage(context, plan.status(), "plan-capacity");
  }
  *context.out << (context.json ? CapacityToJson(*input, *plan) : RenderCapacity(*input, *plan));
  return plan->problems.empty() ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace holdfast
