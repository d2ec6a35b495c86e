// Holdfast's public C++ interface.
#pragma once

#include "holdfast/checkpoint_reader.h"
#include "holdfast/job.h"
#include "holdfast/state.h"
#include "holdfast/status.h"
#include "holdfast/version.h"
#include "holdfast/view.h"
