// What each peer may do with one memory. A peer is known by the name that its endpoint was bound for (Transport::bind).
#pragma once

#include <map>
#include <string>

#include "core/error.h"
#include "core/handle.h"

namespace onesided {

// Not locked: the owner's hub does that.
class Permissions {
 public:
  // `most`: what the memory is for, which is everybody's permission at first.
  explicit Permissions(Access most) : most_(most), everybody_(most) {}

  // RemoteAccessError if the memory is not for that.
  void check(Access access) const {
    if (permits(most_, access)) return;
    fail(ErrorKind::RemoteAccess, "permit: this memory permits '", name_of(most_), "' only, not '", name_of(access),
         "'");
  }

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
  const Access most_;
  Access everybody_;
  std::map<std::string, Access> named_;
};

}  // namespace onesided
