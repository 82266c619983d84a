#include "core/stats.h"

#include <map>
#include <mutex>

#include "core/process.h"

namespace onesided {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Counters>> counters;

  Registry() { hold_over_fork(mutex); }
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: threads may outlive static destructors
  return *instance;
}
// From the start: a fork while another thread makes it would leave a child that waits for that thread.
[[maybe_unused]] const auto& from_the_start = registry();

}  // namespace

std::shared_ptr<Counters> counters_for(const std::string& transport, const std::string& peer) {
  std::lock_guard lock(registry().mutex);
  auto& counters = registry().counters[{transport, peer}];
  if (counters == nullptr) counters = std::make_shared<Counters>();
  return counters;
}

std::vector<StatsRow> stats_snapshot() {
  std::lock_guard lock(registry().mutex);
  std::vector<StatsRow> rows;
  for (const auto& [key, counters] : registry().counters) {
    StatsRow row{key.first, key.second, {}};
    for (unsigned i = 0; i < kCountNames.size(); ++i) {
      row.counts.emplace_back(kCountNames[i], counters->get(static_cast<Count>(i)));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace onesided
