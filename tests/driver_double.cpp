// A stand-in for libcuda.so.1, or with -DHIP for libamdhip64.so: those functions that the driver uses, over
// memory of the host. Work given to a stream is done as late as the API allows, launches of a graph in any order
// that its edges allow, and every misuse is noted. Handles are numbers that are never used again.
//
// A binary is text: the architecture, the kernel's name and its number of parameters.
#include "driver_double.h"

// -- what tests ask for --------------------------------------------------------------------------------------

extern "C" void double_device(int devices, const char* architecture, int major, int minor, int warp, size_t total) {
    state.devices = devices, state.major = major, state.minor = minor, state.warp = warp, state.total = total;
    snprintf(state.architecture, sizeof state.architecture, "%s", architecture);
}
extern "C" void double_fail(const char* function, int calls_before, int code) {
    state.failures[function].push_back({calls_before, code});
}
extern "C" void double_reset() { state = {}, selected = false, kernels = nullptr; }
extern "C" void double_kernels(decltype(kernels) run) { kernels = run; }
extern "C" const char* double_misuses() { return state.misuses.c_str(); }
extern "C" int double_calls(const char* function) { return state.calls[function]; }
// The kernels that ran since the last call.
extern "C" const char* double_launches() {
    state.text = std::move(state.launches);
    state.launches.clear();
    return state.text.c_str();
}
// What is still there.
extern "C" const char* double_left() {
    state.text.clear();
    auto count = [](const char* name, size_t number) {
        if (number) state.text += std::string(name) + " " + std::to_string(number) + "\n";
    };
    count("contexts", state.contexts);
    count("memory", state.memory.size());
    count("pinned", state.pinned.size());
    count("streams", state.streams.size());
    count("events", state.events.size());
    count("modules", state.modules.size());
    count("graphs", state.graphs.size());
    count("instances", state.instances.size());
    return state.text.c_str();
}

// -- devices -------------------------------------------------------------------------------------------------

API(cuInit, hipInit)(unsigned flags) {
    if (int code = begin(__func__)) return code;
    REQUIRE(!flags, "flags");
    state.initialized = true;
    return state.devices ? 0 : NO_DEVICE;
}
API(cuGetErrorName, hipDrvGetErrorName)(int code, const char** name) {
    *name = code == ILLEGAL_ADDRESS ? "ILLEGAL_ADDRESS" : code == OUT_OF_MEMORY ? "OUT_OF_MEMORY" : nullptr;
    return *name ? 0 : INVALID;
}
API(cuDeviceGetCount, hipGetDeviceCount)(int* count) {
    BEGIN;
    *count = state.devices;
    return 0;
}
API(cuDeviceGet, hipDeviceGet)(int* device, int number) {
    BEGIN;
    REQUIRE(number < state.devices, "no such device");
    *device = 70 + number;
    return 0;
}
API(cuDeviceGetName, hipDeviceGetName)(char* name, int size, int device) {
    BEGIN;
    REQUIRE(device >= 70, "no device");
    snprintf(name, size, "Double %d", device - 70);
    return 0;
}
API(cuDeviceGetAttribute, hipDeviceGetAttribute)(int* value, int attribute, int device) {
    BEGIN;
    REQUIRE(device >= 70, "no device");
#ifdef HIP
    const std::map<int, int> attributes = {{87, state.warp}};
#else
    const std::map<int, int> attributes = {{10, state.warp}, {75, state.major}, {76, state.minor}};
#endif
    REQUIRE(attributes.count(attribute), "attribute");
    *value = attributes.at(attribute);
    return 0;
}
#ifdef HIP
extern "C" int hipGetDevicePropertiesR0600(char* properties, int device) {
    BEGIN;
    memset(properties, 0xab, 1472);
    snprintf(properties, 256, "Double %d", device - 70);
    snprintf(properties + 1160, 256, "%s:sramecc+:xnack-", state.architecture);
    return 0;
}
extern "C" int hipSetDevice(int number) {
    BEGIN;
    REQUIRE(number < state.devices, "no such device");
    selected = true;
    return 0;
}
#else
extern "C" int cuDevicePrimaryCtxRetain(Handle* context, int device) {
    BEGIN;
    REQUIRE(device >= 70, "no device");
    ++state.contexts;
    *context = 4711;
    return 0;
}
extern "C" int cuDevicePrimaryCtxRelease_v2(int) {
    BEGIN;
    REQUIRE(state.contexts-- > 0, "never retained");
    return 0;
}
extern "C" int cuCtxSetCurrent(Handle context) {
    BEGIN;
    REQUIRE(context == 4711 && state.contexts, "no context");
    selected = true;
    return 0;
}
#endif

// -- memory --------------------------------------------------------------------------------------------------

API(cuMemGetInfo_v2, hipMemGetInfo)(size_t* free, size_t* total) {
    BEGIN;
    REQUIRE(selected, "no device is selected");
    *free = state.total - state.used, *total = state.total;
    return 0;
}
API(cuMemAlloc_v2, hipMalloc)(uintptr_t* address, size_t size) {
    BEGIN;
    REQUIRE(selected, "no device is selected");
    REQUIRE(size, "no bytes");
    if (state.used + size > state.total) return OUT_OF_MEMORY;
    void* memory = aligned_alloc(256, (size + 255) / 256 * 256);
    memset(memory, 0xff, size);
    *address = reinterpret_cast<uintptr_t>(memory);
    state.memory[*address] = size;
    state.used += size;
    return 0;
}
API(cuMemFree_v2, hipFree)(uintptr_t address) {
    BEGIN;
    REQUIRE(selected, "no device is selected");
    REQUIRE(state.memory.count(address), "not allocated");
    REQUIRE(state.queue.empty(), "work is in flight");
    state.used -= state.memory[address];
    state.memory.erase(address);
    free(reinterpret_cast<void*>(address));
    return 0;
}
API(cuMemHostAlloc, hipHostMalloc)(uintptr_t* address, size_t size, unsigned flags) {
    BEGIN;
    REQUIRE(selected && !flags, "no device is selected, or flags");
    *address = reinterpret_cast<uintptr_t>(malloc(size));
    state.pinned[*address] = size;
    return 0;
}
API(cuMemFreeHost, hipHostFree)(uintptr_t address) {
    BEGIN;
    REQUIRE(state.pinned.erase(address), "not allocated");
    REQUIRE(state.queue.empty(), "work is in flight");
    free(reinterpret_cast<void*>(address));
    return 0;
}
static int copy(const char* function, uintptr_t to, uintptr_t from, size_t size, uintptr_t host, uintptr_t device,
                Handle stream) {
    if (!selected || !state.streams.count(stream)) return misuse(function, "no device or stream");
    if (!lies_in(state.memory, device, size)) return misuse(function, "outside the device's memory");
    if (!lies_in(state.pinned, host, size)) return misuse(function, "the host's memory is not pinned");
    state.queue.push_back({[=] { memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size); }, 0});
    return 0;
}
API(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(uintptr_t to, uintptr_t from, size_t size, Handle stream) {
    BEGIN;
    return copy(__func__, to, from, size, from, to, stream);
}
API(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(uintptr_t to, uintptr_t from, size_t size, Handle stream) {
    BEGIN;
    return copy(__func__, to, from, size, to, from, stream);
}

// -- streams and events --------------------------------------------------------------------------------------

API(cuStreamCreate, hipStreamCreateWithFlags)(Handle* stream, unsigned flags) {
    BEGIN;
    REQUIRE(selected && flags == 1, "no device, or the stream waits for the default one");
    state.streams.insert(*stream = state.next++);
    return 0;
}
API(cuStreamSynchronize, hipStreamSynchronize)(Handle stream) {
    BEGIN;
    REQUIRE(selected && state.streams.count(stream), "no device or stream");
    run_until(0);
    return state.code;
}
API(cuStreamDestroy_v2, hipStreamDestroy)(Handle stream) {
    BEGIN;
    REQUIRE(state.queue.empty(), "work is in flight");
    REQUIRE(state.streams.erase(stream), "no stream");
    return 0;
}
API(cuEventCreate, hipEventCreateWithFlags)(Handle* event, unsigned flags) {
    BEGIN;
    REQUIRE(selected && (flags == 0 || flags == 2), "no device, or flags");
    state.events.insert(*event = state.next++);
    return 0;
}
API(cuEventRecord, hipEventRecord)(Handle event, Handle stream) {
    BEGIN;
    REQUIRE(state.events.count(event) && state.streams.count(stream), "no event or stream");
    state.queue.push_back({[=] { state.event_times[event] = state.clock; }, event});
    return 0;
}
API(cuEventSynchronize, hipEventSynchronize)(Handle event) {
    BEGIN;
    REQUIRE(state.events.count(event), "no event");
    bool recorded = false;
    for (auto& item : state.queue) recorded |= item.second == event;
    if (recorded) run_until(event);
    return state.code;
}
// A launch takes a millisecond.
API(cuEventElapsedTime, hipEventElapsedTime)(float* milliseconds, Handle start, Handle end) {
    BEGIN;
    REQUIRE(state.event_times.count(start) && state.event_times.count(end), "not recorded");
    *milliseconds = float(state.event_times[end] - state.event_times[start]);
    return 0;
}
API(cuEventDestroy_v2, hipEventDestroy)(Handle event) {
    BEGIN;
    REQUIRE(state.events.erase(event), "no event");
    return 0;
}

// -- kernels -------------------------------------------------------------------------------------------------

API(cuModuleLoadData, hipModuleLoadData)(Handle* module, const char* image) {
    BEGIN;
    REQUIRE(selected, "no device is selected");
    char architecture[64], name[256];
    unsigned parameters;
    REQUIRE(sscanf(image, "%63s %255s %u", architecture, name, &parameters) == 3, "no binary");
    if (strcmp(architecture, state.architecture)) return NO_BINARY;
    state.modules.insert(*module = state.next++);
    state.functions[state.next++] = {*module, name, parameters};
    return 0;
}
API(cuModuleGetFunction, hipModuleGetFunction)(Handle* function, Handle module, const char* name) {
    BEGIN;
    REQUIRE(state.modules.count(module), "no module");
    for (auto& [handle, found] : state.functions)
        if (found.module == module && found.name == name) return *function = handle, 0;
    return NOT_FOUND;
}
API(cuModuleUnload, hipModuleUnload)(Handle module) {
    BEGIN;
    REQUIRE(state.queue.empty(), "work is in flight");
    REQUIRE(state.modules.erase(module), "no module");
    return 0;
}
static int make_launch(const char* caller, Launch& launch, Handle function, const unsigned* grid, const unsigned* block,
                       unsigned shared, uintptr_t** arguments, void** extra) {
    auto found = state.functions.find(function);
    if (found == state.functions.end() || !state.modules.count(found->second.module))
        return misuse(caller, "no function");
    if (shared || extra) return misuse(caller, "shared memory, or extra options");
    if (!grid[0] || !grid[1] || grid[1] > 65535 || grid[2] != 1) return misuse(caller, "grid");
    if (!block[0] || block[0] > 1024 || block[1] != 1 || block[2] != 1) return misuse(caller, "block");
    launch = {found->second, {grid[0], grid[1], grid[2]}, block[0], {}};
    for (unsigned i = 0; i < found->second.parameters; ++i) launch.arguments.push_back(*arguments[i]);
    return 0;
}
API(cuLaunchKernel, hipModuleLaunchKernel)
(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
 unsigned block_z, unsigned shared, Handle stream, uintptr_t** arguments, void** extra) {
    BEGIN;
    REQUIRE(selected && state.streams.count(stream), "no device or stream");
    unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    Launch launch;
    if (int code = make_launch(__func__, launch, function, grid, block, shared, arguments, extra)) return code;
    state.queue.push_back({[=] { run(launch); }, 0});
    return 0;
}

// -- graphs --------------------------------------------------------------------------------------------------

struct Parameters {
#ifdef HIP
    unsigned block[3];
    void** extra;
    Handle function;
    unsigned grid[3];
    uintptr_t** arguments;
    unsigned shared;
#else
    Handle function;
    unsigned grid[3], block[3], shared;
    uintptr_t** arguments;
    void** extra;
#endif
};

API(cuGraphCreate, hipGraphCreate)(Handle* graph, unsigned flags) {
    BEGIN;
    REQUIRE(selected && !flags, "no device is selected, or flags");
    state.graphs[*graph = state.next++];
    return 0;
}
API(cuGraphAddKernelNode, hipGraphAddKernelNode)
(Handle* node, Handle graph, const Handle* dependencies, size_t count, const Parameters* p) {
    BEGIN;
    REQUIRE(state.graphs.count(graph), "no graph");
    auto& nodes = state.graphs[graph];
    Node made;
    for (size_t i = 0; i < count; ++i) {
        REQUIRE(nodes.count(dependencies[i]), "depends on a node of no or another graph");
        made.dependencies.push_back(dependencies[i]);
    }
    if (int code = make_launch(__func__, made.launch, p->function, p->grid, p->block, p->shared, p->arguments, p->extra))
        return code;
    nodes[*node = state.next++] = made;
    return 0;
}
API(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags)(Handle* instance, Handle graph, uint64_t flags) {
    BEGIN;
    REQUIRE(state.graphs.count(graph) && !flags, "no graph, or flags");
    state.instances[*instance = state.next++] = state.graphs[graph];
    return 0;
}
API(cuGraphExecKernelNodeSetParams, hipGraphExecKernelNodeSetParams)(Handle instance, Handle node, const Parameters* p) {
    BEGIN;
    REQUIRE(state.instances.count(instance) && state.instances[instance].count(node), "no such node");
    REQUIRE(state.queue.empty(), "work is in flight");
    Launch& launch = state.instances[instance][node].launch;
    const std::string name = launch.function.name;
    int code = make_launch(__func__, launch, p->function, p->grid, p->block, p->shared, p->arguments, p->extra);
    REQUIRE(launch.function.name == name, "another function");
    return code;
}
API(cuGraphNodeSetEnabled, hipGraphNodeSetEnabled)(Handle instance, Handle node, unsigned enabled) {
    BEGIN;
    REQUIRE(state.instances.count(instance) && state.instances[instance].count(node), "no such node");
    REQUIRE(state.queue.empty(), "work is in flight");
    state.instances[instance][node].enabled = enabled;
    return 0;
}
// Of the nodes that may run, runs the last.
static void run_graph(const Graph& graph) {
    std::set<Handle> done;
    while (done.size() < graph.size()) {
        for (auto node = graph.rbegin(); node != graph.rend(); ++node) {
            bool ready = !done.count(node->first);
            for (Handle dependency : node->second.dependencies) ready &= done.count(dependency) != 0;
            if (!ready) continue;
            if (node->second.enabled) run(node->second.launch);
            done.insert(node->first);
            break;
        }
    }
}
API(cuGraphLaunch, hipGraphLaunch)(Handle instance, Handle stream) {
    BEGIN;
    REQUIRE(selected && state.streams.count(stream), "no device or stream");
    REQUIRE(state.instances.count(instance), "no instance");
    for (auto& item : state.instances[instance])
        REQUIRE(state.modules.count(item.second.launch.function.module), "its module was unloaded");
    state.queue.push_back({[graph = state.instances[instance]] { run_graph(graph); }, 0});
    return 0;
}
API(cuGraphExecDestroy, hipGraphExecDestroy)(Handle instance) {
    BEGIN;
    REQUIRE(state.instances.erase(instance), "no instance");
    return 0;
}
API(cuGraphDestroy, hipGraphDestroy)(Handle graph) {
    BEGIN;
    REQUIRE(state.graphs.erase(graph), "no graph");
    return 0;
}
