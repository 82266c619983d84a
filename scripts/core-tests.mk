# Builds the core's own C++ tests: make -f scripts/core-tests.mk VARIANT=plain|asan|tsan. scripts/core-tests runs them.

CXX      ?= g++
OUT      := build/core-tests/$(VARIANT)
SOURCES  := $(shell find csrc -path csrc/python -prune -o -name '*.cpp' -print | sort)
OBJECTS  := $(SOURCES:%.cpp=$(OUT)/%.o)

plain := -O2 -Werror
asan  := -O1 -D_GLIBCXX_ASSERTIONS -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# ThreadSanitizer does not see fences; gcc says so at each one.
tsan  := -O1 -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan

# The interpreter's flags without its headers: nothing outside csrc/python may need them.
COMPILE := $(CXX) -std=c++20 -g -pthread -Wall -Wextra -fno-strict-aliasing $($(VARIANT)) -I csrc $(CXXFLAGS)
LIBS    := -ldl

$(OUT)/tests: $(OBJECTS) $(OUT)/objects
	@$(COMPILE) $(OBJECTS) $(LIBS) -o $@

$(OUT)/%.o: %.cpp $(OUT)/command
	@mkdir -p $(@D)
	@$(COMPILE) -MMD -MP -c $< -o $@

# Each is written anew only when its text changes, and then what depends on it is built again.
.PHONY: force
$(OUT)/command: TEXT = $(COMPILE)
$(OUT)/objects: TEXT = $(OBJECTS)
$(OUT)/command $(OUT)/objects: force
	@mkdir -p $(@D)
	@[ "$$(cat $@ 2>/dev/null)" = '$(TEXT)' ] || echo '$(TEXT)' >$@

-include $(OBJECTS:.o=.d)
