// What a double of a driver's library keeps, and the launches that it runs.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#ifdef HIP
#define API(cuda, hip) extern "C" int hip
#else
#define API(cuda, hip) extern "C" int cuda
#endif
// The name of the function that is running, for misuses, injected failures and counts.
#define BEGIN                                                                                                  \
    if (int code = begin(__func__)) return code
#define REQUIRE(condition, text)                                                                               \
    if (!(condition)) return misuse(__func__, text)

using Handle = uintptr_t;
enum { INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NO_BINARY = 209, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

struct Function {
    Handle module;
    std::string name;
    unsigned parameters;
};
struct Launch {
    Function function;
    unsigned grid[3], threads;
    std::vector<uintptr_t> arguments;
};
struct Node {
    Launch launch;
    std::vector<Handle> dependencies;
    bool enabled = true;
};
using Graph = std::map<Handle, Node>;

static struct {
    int devices = 1, major = 9, minor = 0, warp = 32;
#ifdef HIP
    char architecture[64] = "gfx1100";
#else
    char architecture[64] = "sm_90";
#endif
    size_t total = 64 << 20, used = 0;
    bool initialized = false;
    int contexts = 0, code = 0;  // `code`: a failure that all later calls repeat
    uint64_t clock = 0;
    Handle next = 1 << 20;
    std::map<uintptr_t, size_t> memory, pinned;
    std::set<Handle> streams, events, modules;
    std::map<Handle, Function> functions;
    std::map<Handle, Graph> graphs, instances;
    std::map<Handle, uint64_t> event_times;
    std::vector<std::pair<std::function<void()>, Handle>> queue;  // work, and the event that it records
    std::map<std::string, std::vector<std::pair<int, int>>> failures;  // by function: calls before, and code
    std::map<std::string, int> calls;
    std::string misuses, launches, text;
} state;
static thread_local bool selected = false;
static int (*kernels)(const char*, const unsigned*, unsigned, const uintptr_t*) = nullptr;  // instead of `run`'s

static int misuse(const char* function, const std::string& text) {
    state.misuses += std::string(function) + ": " + text + "\n";
    return INVALID;
}

static int begin(const std::string& function) {
    ++state.calls[function];
    for (auto& [before, code] : state.failures[function])
        if (before-- == 0) return code;
    if (!state.initialized && function.find("Init") == std::string::npos) return misuse(function.c_str(), "not initialized");
    return state.code;
}

// Whether an access of `size` bytes lies in one piece of memory.
static bool lies_in(const std::map<uintptr_t, size_t>& memory, uintptr_t address, size_t size) {
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return false;
    --after;
    return address + size <= after->first + after->second;
}

static void run_until(Handle event) {
    while (!state.queue.empty()) {
        auto [work, recorded] = state.queue.front();
        state.queue.erase(state.queue.begin());
        if (!state.code) work();
        if (event && recorded == event) {
            bool again = false;  // an event stands for its latest record
            for (auto& item : state.queue) again |= item.second == event;
            if (!again) return;
        }
    }
}

// The kernels: `copy` and `accumulate` as in simt_kernels.py, and `add`: z = x + y.
static void run(const Launch& launch) {
    ++state.clock;
    state.launches += launch.function.name + "\n";
    if (kernels) {
        state.code = kernels(launch.function.name.c_str(), launch.grid, launch.threads, launch.arguments.data());
        return;
    }
    auto at = [&](unsigned argument, size_t index) -> float* {
        uintptr_t address = launch.arguments[argument] + 4 * index;
        static float nowhere;
        if (lies_in(state.memory, address, 4)) return reinterpret_cast<float*>(address);
        state.code = ILLEGAL_ADDRESS;
        return &nowhere;
    };
    for (unsigned y = 0; y < launch.grid[1]; ++y)
        for (unsigned x = 0; x < launch.grid[0]; ++x)
            for (unsigned thread = 0; thread < launch.threads && !state.code; ++thread) {
                const size_t i = y * launch.threads + thread;
                if (launch.function.name == "accumulate") *at(1, thread) = *at(1, thread) * 2 + *at(0, thread);
                if (launch.function.name == "add") *at(2, thread) = *at(0, thread) + *at(1, thread);
                if (launch.function.name == "copy") {
                    int control;
                    memcpy(&control, at(0, 0), 4);
                    if (i < 64u * control) *at(2, i) = *at(1, i);
                }
            }
}
