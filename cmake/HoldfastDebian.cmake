# The Debian packages (scripts/package deb, or `cpack -G DEB` in any build folder): `holdfast`, the daemon, its unit, ckptctl and
# the library that programs run with; `holdfast-dev`, what they are compiled with. The distribution's libraries are
# dependencies, found by dpkg-shlibdeps.
set(debian_files ${PROJECT_SOURCE_DIR}/deploy/debian)

# What only a package has, at places that only a package may have: never part of `cmake --install`.
holdfast_install_unit(lib/systemd/system debian EXCLUDE_FROM_ALL)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/ckptd.yaml DESTINATION /etc/holdfast COMPONENT debian EXCLUDE_FROM_ALL)
install(FILES ${HOLDFAST_DROP_INS} DESTINATION share/doc/holdfast/examples COMPONENT debian EXCLUDE_FROM_ALL)
foreach(package holdfast holdfast-dev)
  set(component debian)
  if(package STREQUAL "holdfast-dev")
    set(component debian-dev)
  endif()
  install(FILES ${debian_files}/copyright DESTINATION share/doc/${package} COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(CODE "
    set(PROJECT_VERSION ${PROJECT_VERSION})
    set(doc \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/doc/${package}\")
    configure_file(\"${debian_files}/changelog.in\" \"\${doc}/changelog\" @ONLY NO_SOURCE_PERMISSIONS)
    execute_process(COMMAND gzip -9nf \"\${doc}/changelog\" COMMAND_ERROR_IS_FATAL ANY)"
    COMPONENT ${component} EXCLUDE_FROM_ALL)
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME holdfast)
set(CPACK_PACKAGE_VENDOR Holdfast)
set(CPACK_PACKAGE_CONTACT "Holdfast maintainers <maintainers@holdfast.invalid>")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR})
# With DESTDIR, so that /etc/holdfast is what it says, and the unit names /usr/bin.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL daemon client development debian debian-dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
foreach(component DAEMON CLIENT DEBIAN)
  set(CPACK_COMPONENT_${component}_GROUP runtime)
endforeach()
foreach(component DEVELOPMENT DEBIAN-DEV)
  set(CPACK_COMPONENT_${component}_GROUP development)
endforeach()

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME holdfast)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION admin)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "checkpoints of long training runs, in memory and on drives
Holdfast keeps the state of long training runs safe without making them wait.
This is ckptd, one daemon per node, which keeps what training processes copied
into shared memory and copies it on to drives, other nodes and a remote file
system; ckptctl, its command line; and the library of its C++ clients.")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
# (CMake knows this by no group's name.)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY "=")
# ckptctl loads it when it is asked about RDMA (`ckptctl doctor`).
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS libfabric1)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
  ${debian_files}/conffiles ${debian_files}/postinst ${debian_files}/prerm ${debian_files}/postrm ${debian_files}/triggers)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME holdfast-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "holdfast (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "checkpoints of long training runs: headers of the C++ client
What a program that saves its state through Holdfast's C++ library is compiled
with: headers, and a package for CMake's find_package.")

include(CPack)
cpack_add_component_group(runtime)
cpack_add_component_group(development)
