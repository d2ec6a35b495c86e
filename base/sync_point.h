// Named places where a test makes the process die or stop, compiled in only with
// HOLDFAST_SYNC_POINTS.
//
//   HF_SYNC_POINT("daemon.seal.record_written");
//
// The environment of the process under test says what happens:
//   HOLDFAST_SYNC_POINT="daemon.seal.record_written:kill"     SIGKILL to itself on the first pass
//   HOLDFAST_SYNC_POINT="client.save.copied:kill@3"           on the third pass
//   HOLDFAST_SYNC_POINT="client.save.copied:stop@2"           SIGSTOP to itself on the second pass
// Several are separated by ','. Parsed once; an unknown action aborts with a message. Without the
// variable a pass costs one relaxed load. Every name is listed in tests/sync_points.txt, and the
// crash tests run through that list.
#pragma once

#ifdef HOLDFAST_SYNC_POINTS
namespace holdfast {
void PassSyncPoint(const char* name);
}
#define HF_SYNC_POINT(name) ::holdfast::PassSyncPoint(name)
#else
#define HF_SYNC_POINT(name) static_cast<void>(0)
#endif
