/*
 * bound.c: which functions a loaded library calls by some names, read where the dynamic linker wrote it down.
 *
 * Several OpenMP runtimes may be loaded, under any file names, preloaded or shared by a whole environment: only the
 * library itself knows which one it was bound to.  ELF with 64 bits and explicit addends, so Linux on x86-64 and ARM;
 * nothing is found elsewhere.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* dl_iterate_phdr */
#endif

#include "team.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__) && defined(__LP64__)
#include <link.h>

typedef struct {
    const char *library;
    const char *const *names;
    void **found;
    int n;
} search;

/* A table of relocations, each for one place that holds the address of a symbol. */
typedef struct {
    const Elf64_Rela *first;
    size_t bytes;
} table;

typedef struct {
    uintptr_t base, end; /* where the library lies */
    const Elf64_Sym *symbols;
    const char *strings;
    table tables[2]; /* of functions that are called; of other places */
} library;

/* Some C libraries leave such a pointer as it stands in the file, relative to the base. */
static const void *
pointer(const library *lib, uintptr_t value)
{
    return (const void *)(value < lib->base ? value + lib->base : value);
}

static library
library_at(const struct dl_phdr_info *info)
{
    library lib = {.base = info->dlpi_addr};
    const Elf64_Dyn *entry = NULL;

    for (int i = 0; i < info->dlpi_phnum; i++) {
        const Elf64_Phdr *const part = &info->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC) {
            entry = (const Elf64_Dyn *)(lib.base + part->p_vaddr);
        } else if (part->p_type == PT_LOAD && lib.base + part->p_vaddr + part->p_memsz > lib.end) {
            lib.end = lib.base + part->p_vaddr + part->p_memsz;
        }
    }
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB: lib.symbols = pointer(&lib, entry->d_un.d_ptr); break;
        case DT_STRTAB: lib.strings = pointer(&lib, entry->d_un.d_ptr); break;
        case DT_JMPREL: lib.tables[0].first = pointer(&lib, entry->d_un.d_ptr); break;
        case DT_PLTRELSZ: lib.tables[0].bytes = entry->d_un.d_val; break;
        case DT_RELA: lib.tables[1].first = pointer(&lib, entry->d_un.d_ptr); break;
        case DT_RELASZ: lib.tables[1].bytes = entry->d_un.d_val; break;
        }
    }
    return lib;
}

/* The addresses in those places of `t` that are for the wanted names, and that lie in another library. */
static void
look_through(const search *s, const library *lib, const table *t)
{
    const size_t n = t->first == NULL ? 0 : t->bytes / sizeof *t->first;

    for (size_t i = 0; i < n; i++) {
        const Elf64_Sym *const symbol = &lib->symbols[ELF64_R_SYM(t->first[i].r_info)];
        if (ELF64_R_SYM(t->first[i].r_info) == 0 || symbol->st_shndx != SHN_UNDEF) {
            continue;
        }
        for (int k = 0; k < s->n; k++) {
            if (strcmp(lib->strings + symbol->st_name, s->names[k]) == 0) {
                const uintptr_t address = *(const uintptr_t *)(lib->base + t->first[i].r_offset);
                /* One that lies in the library itself leads to the linker, which has not been asked yet. */
                if (address != 0 && (address < lib->base || address >= lib->end)) {
                    s->found[k] = (void *)address;
                }
            }
        }
    }
}

static int
look_at(struct dl_phdr_info *info, size_t size, void *the_search)
{
    const search *const s = the_search;
    const char *const slash = strrchr(info->dlpi_name, '/'), *const name = slash == NULL ? info->dlpi_name : slash + 1;

    (void)size;
    if (strncmp(name, s->library, strlen(s->library)) != 0) {
        return 0;
    }
    const library lib = library_at(info);
    if (lib.symbols != NULL && lib.strings != NULL) {
        look_through(s, &lib, &lib.tables[0]);
        look_through(s, &lib, &lib.tables[1]);
    }
    return 1;
}

void
mha_py_bound(const char *library, const char *const *names, void **found, int n)
{
    memset(found, 0, (size_t)n * sizeof *found);
    dl_iterate_phdr(look_at, &(search){library, names, found, n});
}
#else
void
mha_py_bound(const char *library, const char *const *names, void **found, int n)
{
    (void)library;
    (void)names;
    memset(found, 0, (size_t)n * sizeof *found);
}
#endif
