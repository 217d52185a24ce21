"""Stand-ins for packages that need CANN or Huawei's compilers. What cannot work here raises when it is used."""
