// What a new g++ takes from a newer libstdc++ or glibc than a manylinux_2_28 system has. Linked into the libraries of a
// wheel alone, whose version script keeps these names inside.

#include <new>
#include <sstream>

// glibc 2.32 says so that a process has one thread. "No" is right for every process.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {

// libstdc++ of GCC 11 and newer.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// libstdc++ of GCC 9 and newer.
template basic_stringstream<char>::basic_stringstream();
template basic_ostringstream<char>::basic_ostringstream();

}  // namespace std
