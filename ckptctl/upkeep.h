// Parts of the commands that change something, where one is made of several.
#pragma once

#include "absl/status/status.h"
#include "ckptctl/commands.h"

namespace holdfast {

namespace v1 {
class SetOptionsRequest;
}

// `rm` with a step.
ExitCode RunRemoveStep(const Context& context, const RemoveArguments& arguments);

// The words of `set`: [JOB] name=value…, or JOB with --clear. InvalidArgument says what is wrong
// with them. Whether a name exists and a value fits is the daemon's to say.
absl::Status ParseSetWords(const SetArguments& arguments, v1::SetOptionsRequest& request);
absl::Status CheckSetWords(const SetArguments& arguments);

}  // namespace holdfast
