/* Prints the layout of vgpu.h, a line for each number, and runs a kernel by it. */
#include <stdio.h>
#include <string.h>

#include "vgpu.h"

/* Stores 1 in its first array. */
static const char two[] =
    ".version 7.8\n.target sm_90\n.address_size 64\n"
    ".visible .entry two(.param .u64 a, .param .u64 b)\n{\n.reg .b64 %a;\n"
    "ld.param.u64 %a, [a];\nst.global.u32 [%a], 1;\nret;\n}\n";

/* Stores twice its second array in its first. */
static const char twice[] =
    ".version 7.8\n.target sm_90\n.address_size 64\n"
    ".visible .entry twice(.param .u64 to, .param .u64 from)\n{\n.reg .b64 %a<4>;\n.reg .b32 %r<2>;\n"
    "ld.param.u64 %a1, [to];\nld.param.u64 %a2, [from];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %a3, %r1, 4;\n"
    "add.u64 %a1, %a1, %a3;\nadd.u64 %a2, %a2, %a3;\nld.global.u32 %r1, [%a2];\nadd.u32 %r1, %r1, %r1;\n"
    "st.global.u32 [%a1], %r1;\nret;\n}\n";

int main(int argc, char **argv) {
    static char ptx[1 << 16], report[1 << 12];
    unsigned words[64], value = 5, grid[3] = {2, 1, 1}, block[3] = {32, 1, 1};
    vgpu_arg args[] = {{words, sizeof words, VGPU_IN_OUT}, {&value, sizeof value, VGPU_VALUE}};
    vgpu_options options;
    FILE *file;

    printf("%zu %zu %zu %zu\n", sizeof(vgpu_arg), offsetof(vgpu_arg, data), offsetof(vgpu_arg, bytes),
           offsetof(vgpu_arg, kind));
    printf("%zu %zu %zu %zu\n", sizeof(vgpu_options), offsetof(vgpu_options, seed),
           offsetof(vgpu_options, max_warp_instructions), offsetof(vgpu_options, check));

    if (argc != 2 || !(file = fopen(argv[1], "r"))) return 1;
    ptx[fread(ptx, 1, sizeof ptx - 1, file)] = 0;
    fclose(file);
    for (unsigned i = 0; i < 64; i++) words[i] = i;
    if (vgpu_run(ptx, "add", grid, block, 0, args, 2, NULL, report, sizeof report) != VGPU_OK) {
        puts(report);
        return 2;
    }
    for (unsigned i = 0; i < 64; i++)
        if (words[i] != i + 5) return 3;

    memset(&options, 0, sizeof options);
    options.check = 1;
    printf("%d\n", vgpu_run(ptx, "race", grid, block, 0, args, 1, &options, report, sizeof report));
    puts(report);

    /* A call that fails changes no array: the second one is null. */
    memset(words, 0, sizeof words);
    vgpu_arg null[] = {{words, sizeof words, VGPU_IN_OUT}, {NULL, 4, VGPU_OUT}};
    printf("%d\n", vgpu_run(two, "two", grid, block, 0, null, 2, NULL, report, sizeof report));
    printf("%u %s\n", words[0], report);

    /* Parameters with the same memory share an array, whatever their kinds. Two inputs stay as they
       were. */
    unsigned one[3] = {1, 1, 1}, four[3] = {4, 1, 1};
    for (int first = VGPU_IN; first <= VGPU_IN_OUT; first++)
        for (int second = VGPU_IN; second <= VGPU_IN_OUT; second++) {
            if (first == VGPU_OUT && second == VGPU_OUT) continue;
            vgpu_arg same[] = {{words, 16, first}, {words, 16, second}};
            for (unsigned i = 0; i < 4; i++) words[i] = i + 1;
            int result = vgpu_run(twice, "twice", one, four, 0, same, 2, &options, report, sizeof report);
            printf("%d %d: %d %u %u %u %u\n", first, second, result, words[0], words[1], words[2], words[3]);
        }
    /* Other common memory is an error if one of both is written. */
    vgpu_arg common[] = {{words, 16, VGPU_OUT}, {words + 3, 16, VGPU_IN}};
    printf("%d\n", vgpu_run(twice, "twice", one, four, 0, common, 2, NULL, report, sizeof report));
    puts(report);
    vgpu_arg beside[] = {{words, 16, VGPU_OUT}, {words + 4, 16, VGPU_IN}};
    printf("%d\n", vgpu_run(twice, "twice", one, four, 0, beside, 2, NULL, report, sizeof report));

    /* The launch finds the kernel's fault. */
    static const char unwritten[] =
        ".version 7.8\n.target sm_90\n.address_size 64\n"
        ".visible .entry k(.param .u64 to)\n{\n.reg .b64 %a;\n.reg .b32 %r;\n"
        "ld.param.u64 %a, [to];\nst.global.u32 [%a], %r;\nret;\n}\n";
    printf("%d\n", vgpu_run(unwritten, "k", one, one, 0, args, 1, &options, report, sizeof report));

    /* Sizes that no host has: nothing runs, and nothing is read or written. */
    size_t huge[2] = {(size_t)1 << 62, (size_t)1 << 63};
    for (int size = 0; size < 2; size++)
        for (int kind = VGPU_IN; kind <= VGPU_IN_OUT; kind++) {
            vgpu_arg large[] = {{words, huge[size], kind}};
            printf("%d", vgpu_run(ptx, "race", grid, block, 0, large, 1, NULL, report, sizeof report));
            printf(" %s\n", report);
        }
    printf("%d", vgpu_run(ptx, "race", grid, block, 0, args, (size_t)1 << 60, NULL, report, sizeof report));
    printf(" %s\n", report);
    return 0;
}
