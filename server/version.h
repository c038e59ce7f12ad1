#ifndef LATENTD_SERVER_VERSION_H_
#define LATENTD_SERVER_VERSION_H_

namespace latentd {

// Of the CMake project.
inline constexpr char kVersion[] = LATENTD_VERSION;

}  // namespace latentd

#endif  // LATENTD_SERVER_VERSION_H_
