// What each peer may do with one memory. A peer is known by the name that its endpoint was bound for (Transport::bind).
#pragma once

#include <map>
#include <string>

#include "core/handle.h"

namespace onesided {

// Not locked: the owner's hub does that.
class Permissions {
 public:
  explicit Permissions(Access everybody) : everybody_(everybody) {}

  // Of everybody who has no permission of its own, if `peer` is empty.
  void set(const std::string& peer, Access access) {
    if (peer.empty()) {
      everybody_ = access;
    } else {
      named_[peer] = access;
    }
  }
  Access of(const std::string& peer) const {
    const auto named = named_.find(peer);
    return named == named_.end() ? everybody_ : named->second;
  }

 private:
  Access everybody_;
  std::map<std::string, Access> named_;
};

}  // namespace onesided
