// The one error type of the data plane. Bindings turn each kind into the class of that name in onesided.errors.
#pragma once

#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace onesided {

enum class ErrorKind : unsigned {
  Onesided,
  ConnectionLost,
  DeadlineExceeded,
  RemoteAccess,
  Bounds,
  Layout,
  Handle,
  Registration,
  StaleHandle,
  Unsupported,
};
inline constexpr unsigned kErrorKinds = static_cast<unsigned>(ErrorKind::Unsupported) + 1;

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int error_number = 0)
      : std::runtime_error(message), kind_(kind), error_number_(error_number) {}

  ErrorKind kind() const { return kind_; }
  // The errno behind a RegistrationError, else 0.
  int error_number() const { return error_number_; }

 private:
  ErrorKind kind_;
  int error_number_;
};

// Writes all arguments behind each other.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, text(parts...));
}

// For a system call that failed: the message ends with what errno says.
template <class... Parts>
[[noreturn]] void fail_errno(ErrorKind kind, int error_number, const Parts&... parts) {
  throw Error(kind, text(parts..., ": ", std::strerror(error_number), " (errno ", error_number, ")"), error_number);
}

// For several steps that are all to be taken even if one fails; the first failure is thrown at the end.
class FirstFailure {
 public:
  template <class Step>
  bool attempt(Step&& step) {
    try {
      step();
      return true;
    } catch (...) {
      if (first_ == nullptr) first_ = std::current_exception();
      return false;
    }
  }
  void rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace onesided
