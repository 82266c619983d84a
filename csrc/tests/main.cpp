#define DOCTEST_CONFIG_IMPLEMENT
#include <signal.h>
#include <sys/prctl.h>

#include "tests/support.h"

int main(int argc, char** argv) {
  using namespace onesided::tests;
  if (argc == 3 && std::string(argv[1]) == "role") {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const std::string role = argv[2];
    return role == "peer" ? peer_role() : role == "event" ? event_role() : 2;
  }
  return doctest::Context(argc, argv).run();
}
