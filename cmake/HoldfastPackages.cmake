# What is handed out: the Python wheel's part of this tree (client-lib/python/pyproject.toml, scripts/wheel), and the
# relocatable tarball (scripts/package).

# The component `python` is what goes into the wheel beside the package's own files.
if(SKBUILD)
  install(TARGETS holdfast_python LIBRARY DESTINATION holdfast COMPONENT python)
  install(TARGETS ckptd ckptctl RUNTIME DESTINATION holdfast/bin COMPONENT python)
endif()

# The tarball is unpacked anywhere, on machines with nothing but the C and C++ runtime: its programs find the libraries that
# lie beside them before any other (DT_RPATH, which LD_LIBRARY_PATH does not override).
if(HOLDFAST_PACKAGE)
  set_target_properties(ckptd ckptctl PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
  set_target_properties(holdfast PROPERTIES INSTALL_RPATH "$ORIGIN")
  foreach(target ckptd ckptctl holdfast)
    target_link_options(${target} PRIVATE "LINKER:--disable-new-dtags")
  endforeach()
  install(CODE "execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/carry-libraries
    \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib\" \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/licences\"
    $<TARGET_FILE:ckptd> $<TARGET_FILE:ckptctl> $<TARGET_FILE:holdfast> COMMAND_ERROR_IS_FATAL ANY)" COMPONENT libraries)
  install(FILES ${HOLDFAST_WHEEL} DESTINATION wheel COMPONENT wheel)
  install(FILES ${PROJECT_SOURCE_DIR}/docs/install.md ${PROJECT_SOURCE_DIR}/docs/ckptctl.md DESTINATION share/holdfast COMPONENT daemon)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION . COMPONENT daemon)

  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_NAME holdfast)
  set(CPACK_PACKAGE_FILE_NAME holdfast-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR})
  set(CPACK_COMPONENTS_ALL daemon client libraries wheel)
  set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
  set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
  set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
  set(CPACK_STRIP_FILES ON)
  include(CPack)
endif()
