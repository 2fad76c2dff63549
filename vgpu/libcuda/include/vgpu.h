/* One launch on a virtual GPU, without a driver: PTX in, results out. */
#ifndef EPOXIDE_VGPU_H
#define EPOXIDE_VGPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of arguments. */
enum {
    /* The kernel gets the bytes themselves: a number or a struct. */
    VGPU_VALUE = 0,
    /* The kernel gets the address of an array that holds the bytes. */
    VGPU_IN = 1,
    /* The kernel gets the address of an unwritten array, which is copied back. In check mode the
       kernel must write all of it. */
    VGPU_OUT = 2,
    /* Both. */
    VGPU_IN_OUT = 3
};

/* Results. */
enum {
    VGPU_OK = 0,
    /* A pointer is null, a kind or the number or size of the arguments is wrong, or arrays overlap. */
    VGPU_BAD_ARGUMENT = 1,
    /* The PTX has an error or an instruction that the virtual GPU lacks. */
    VGPU_BAD_PTX = 2,
    /* The launch cannot start: its shape, its shared memory, memory for its arrays. */
    VGPU_BAD_LAUNCH = 3,
    /* The kernel did what a program must not do: out of bounds, a race, a deadlock, a trap, a read
       of a register or of memory that nothing has written. */
    VGPU_FAULT = 4
};

/* An argument. Arrays with the same data and bytes are one array for the kernel, which is VGPU_IN_OUT
   unless all are VGPU_IN or all are VGPU_OUT. Arrays that overlap otherwise are an error, unless
   both are VGPU_IN. */
typedef struct vgpu_arg {
    /* The value, or the contents of the array. */
    void *data;
    /* Its length in bytes. */
    size_t bytes;
    /* VGPU_VALUE, VGPU_IN, VGPU_OUT or VGPU_IN_OUT. */
    int kind;
} vgpu_arg;

/* All zero, or a null pointer, are the defaults. */
typedef struct vgpu_options {
    /* Not 0: the order of warps is drawn from it. */
    uint64_t seed;
    /* A kernel that runs so many warp instructions without progress is stopped. 0 is 2^28. */
    uint64_t max_warp_instructions;
    /* Not 0: data races and reads of unwritten memory are faults. */
    int check;
} vgpu_options;

/* Runs the kernel of `ptx` whose name is `entry`, or the only one whose name contains it, over
   `grid` blocks of `block` threads, with `dynamic_shared` bytes of dynamic shared memory, and
   copies its arrays back. Arrays are not changed unless the result is VGPU_OK. For any other
   result, `report` gets the explanation: a buffer of `report_bytes` bytes, which may be null. */
int vgpu_run(const char *ptx, const char *entry, const unsigned grid[3], const unsigned block[3],
             unsigned dynamic_shared, const vgpu_arg *args, size_t num_args, const vgpu_options *options,
             char *report, size_t report_bytes);

#ifdef __cplusplus
}
#endif

#endif
